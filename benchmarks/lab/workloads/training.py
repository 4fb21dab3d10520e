"""A training run by the clock: how many gradients a group of workers computes in a fixed span of time.

The loop is the user's own: DDP around a model, ``torchext.attach`` where the backend needs it, nothing else. Counting
by time and not by steps is what makes a decentralized backend comparable: its workers need not take equally many.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lab.report.results import Checks, in_turn
from lab.run.rank import Rank
from lab.workloads.contenders import Contender, Training, contender
from lab.workloads.emulated import EmulatedModel
from lab.workloads.stragglers import Stragglers, parse

_LEARNING_RATE = 1e-3
_OPTIMIZER = functools.partial(torch.optim.SGD, lr=_LEARNING_RATE)
_CHECK_STEPS = 4
_CHECK_SPEED = 0.2  # the steps of the check need not take their full time
_TOLERANCE = 1e-4  # float32: rounding of some hundred steps and averages, relative to the distance moved


def progress(completions: Sequence[float], moment: float) -> float:
    """Returns how many steps were done at ``moment``, with the part of the running step that had passed.

    Args:
        completions: When each step ended, ascending, the first of them being the start.
        moment: Inside their span.
    """
    if not completions[0] <= moment <= completions[-1]:
        raise ValueError(f"training: {moment} is outside the recorded {completions[0]} to {completions[-1]}")
    after = max(1, bisect.bisect_left(completions, moment))
    begin, end = completions[after - 1], completions[after]
    return after - 1 + (moment - begin) / (end - begin)


class Run:
    """One contender's model in one session."""

    def __init__(self, rank: Rank, contender: Contender, workload: dict[str, Any], stragglers: Stragglers) -> None:
        self.rank, self.contender, self.stragglers = rank, contender, stragglers
        self.module = EmulatedModel(**workload)
        self.module.set_gradient((rank.rank + 1) / rank.world_size)
        self.training: Training = contender.prepare(self.module, _OPTIMIZER)
        self.attach()
        self.input = torch.zeros(1)
        self.steps = 0

    def attach(self) -> None:
        """Makes the training ready: a hook for those who measure it."""
        self.training.attach()

    def step(self, speed: float = 1.0) -> None:
        """Takes one step of the loop."""
        self.module.clock.factor = speed * self.stragglers.factor(self.rank.rank, self.steps)
        self.training.optimizer.zero_grad()
        self.training.model(self.input).sum().backward()
        self.training.optimizer.step()
        self.steps += 1

    def error(self) -> float:
        """Averages all replicas and returns how far they are from the right answer, relative to the way they went.

        Every mixing matrix is doubly stochastic: whatever was averaged with whom, the mean of all replicas is where
        plain gradient descent takes it: the start less the rate times the mean of each rank's (steps x gradient).
        Where that does not hold (late models weighted anew, workers that stopped at different steps of hop) what is
        left to compare is looser: all replicas are the same now, and have gone some way, but none further than the
        worker with the most iterations and the largest gradient could have.
        """
        self.training.synchronize()
        world = self.rank.world_size
        counts = torch.tensor([self.steps, -self.steps, self.training.iteration() or self.steps])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        most, fewest, farthest = int(counts[0]), -int(counts[1]), int(counts[2])
        if not self.contender.keeps_the_mean or (self.contender.backend == "hop" and most != fewest):
            return self._loose_error(farthest)
        moved = torch.tensor([self.steps * (self.rank.rank + 1) / world], dtype=torch.float64)
        dist.all_reduce(moved)
        expected = -_LEARNING_RATE * moved.item() / world
        worst = self._farthest(expected)
        errors = torch.tensor([worst / abs(expected)], dtype=torch.float64)
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
        return errors.item()

    def _loose_error(self, iterations: int) -> float:
        """Returns how far the replicas are from each other or outside of what is possible, relative to the latter."""
        limit = -_LEARNING_RATE * iterations
        values = torch.stack(
            [weight.double().aminmax()[end] for weight in self.training.parameters() for end in (0, 1)]
        )
        lowest, highest = values.min(), values.max()
        ends = torch.stack([-lowest, highest])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        apart = float(ends[1] + ends[0])
        beyond = max(0.0, limit - float(lowest), float(highest) - 1e-3 * limit)
        return max(apart, beyond) / abs(limit)

    def taken_in(self) -> float:
        """Returns how far this replica is from where its own gradients alone take it, relative to that way.

        No collective: under hop workers that skip are not in one iteration, and those that wait for their models must
        not wait in a collective of somebody else.
        """
        self.training.settle()  # an average may still be under way; the next forward would have waited for it
        alone = -_LEARNING_RATE * self.steps * (self.rank.rank + 1) / self.rank.world_size
        return self._farthest(alone) / abs(alone)

    def check(self) -> float:
        """Returns :meth:`error`, or infinity where no replica has taken in anything of another."""
        taken_in = self.taken_in()
        error = self.error()
        seen = torch.tensor([taken_in], dtype=torch.float64)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return error if seen.item() > _TOLERANCE else float("inf")

    def _farthest(self, value: float) -> float:
        return max(float((weight.double() - value).abs().max()) for weight in self.training.parameters())


def run_window(
    rank: Rank,
    contender: Contender,
    *,
    workload: dict[str, Any],
    stragglers: Stragglers,
    checks: Checks,
    warmup_s: float,
    window_s: float,
    tuning_s: float = 0.0,
    check_steps: int = _CHECK_STEPS,
) -> dict[str, Any]:
    """Trains through warm-up and one window of wall-clock time, the same on all ranks.

    Args:
        rank: Of this process.
        contender: How to train.
        workload: Arguments of EmulatedModel.
        stragglers: Who is slow.
        checks: Gets the contender's check, before anything is timed.
        warmup_s: Between the common start and the window.
        window_s: Length of the window.
        tuning_s: Before the warm-up, at most, for contenders that tune themselves; it ends when they have decided.
        check_steps: Number of steps of the check; fewer where a step takes seconds.

    Returns:
        ``steps`` inside the window (with fractions), ``window`` by ``time.monotonic()``, ``step_ms``, ``cpu_ms`` of
        processor a step, ``drift`` of the emulated compute as a share, ``error`` of the parameters after the run,
        ``stats`` of the synchronizer, and ``stats_before`` the warm-up, which tell whether it was still tuning inside
        the window.
    """
    with rank.process_group(contender.backend, contender.pg_options()):
        run = Run(rank, contender, workload, stragglers)
        for _ in range(check_steps):  # a tuner would learn from steps that are not like those to come
            run.step(1.0 if contender.tunes else _CHECK_SPEED)
        checks.confirm(contender.name, run.check(), _TOLERANCE)
        if tuning_s and contender.tunes:
            completions = [rank.board.barrier()]
            _train_until(run, completions[0] + tuning_s, completions, early=run.training.decided)
            checks.confirm(contender.name, run.error(), _TOLERANCE)  # again: it may train in another way by now
        stats_before = run.training.stats()

        completions = [rank.board.barrier()]
        checks.require(contender.name)
        begin = completions[0] + warmup_s
        end = begin + window_s
        run.module.clock.reset()
        cpu_begin = time.process_time()
        _train_until(run, end, completions)
        cpu_s = time.process_time() - cpu_begin

        clock = run.module.clock
        stats = run.training.stats()
        error = run.error()
        checks.confirm(f"{contender.name} after", error, _TOLERANCE)
        run.training.detach()
        # The model goes before its group: where DDP's reducer is the last to hold a Gloo group, torch 2.11 waits under
        # the GIL for Gloo's threads, one of which may be waiting for the GIL.
        del run
    steps = progress(completions, end) - progress(completions, begin)
    return {
        "steps": steps,
        "window": (begin, end),
        "iterations": steps * _iterations_a_step(stats_before, stats),
        "step_ms": window_s / steps * 1e3,
        "longest_ms": max(after - before for before, after in itertools.pairwise(completions)) * 1e3,
        "median_ms": statistics.median(after - before for before, after in itertools.pairwise(completions)) * 1e3,
        "cpu_ms": cpu_s / (len(completions) - 1) * 1e3,
        "drift": clock.taken_s / clock.target_s - 1 if clock.target_s else 0.0,
        "error": error,
        "stats": stats,
        "stats_before": stats_before,
    }


def _train_until(run: Run, end: float, completions: list[float], *, early: Callable[[], bool] = lambda: False) -> None:
    """Trains until ``end`` has passed, and appends when each step ended.

    In lockstep the number of steps is the same on all ranks, and ends also when ``early`` says so on rank 0.
    """
    board, first = run.rank.board, run.steps
    while True:
        run.step()
        completions.append(time.monotonic())
        if not run.contender.lockstep:
            if completions[-1] > end:
                return
            continue
        # In lockstep all must take the same number of steps. When rank 0 ends step i, nobody has ended i + most_ahead:
        # a stop there, written now, is seen by everybody in time.
        done = run.steps - first
        if board.stop_step == 0 and board.rank == 0 and (completions[-1] > end or early()):
            board.stop_step = done + run.contender.most_ahead
        elif board.stop_step == done:
            break
    board.barrier()  # all have left the loop
    if board.rank == 0:
        board.stop_step = 0


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function of the training benchmarks: every contender in turn, each repeat in a session of its own.

    ``rank.settings``: ``contenders`` (texts), ``options`` (of a torchext backend), ``workload``, ``stragglers`` (text),
    ``seed``, ``repeats``, ``warmup_s``, ``window_s``, and where they differ from ``run_window``'s own ``tuning_s`` and
    ``check_steps``.
    """
    settings = rank.settings
    checks = Checks()
    stragglers = parse(settings["stragglers"], rank.world_size, seed=settings["seed"])
    contenders = [contender(text, **settings["options"]) for text in settings["contenders"]]
    spans = {key: settings[key] for key in ("warmup_s", "window_s", "tuning_s", "check_steps") if key in settings}

    def measure(which: Contender) -> dict[str, Any]:
        return run_window(rank, which, workload=settings["workload"], stragglers=stragglers, checks=checks, **spans)

    runs = in_turn({which.name: functools.partial(measure, which) for which in contenders}, settings["repeats"])
    return {"checks": checks.done, "runs": runs}


def _iterations_a_step(before: dict[str, Any] | None, after: dict[str, Any] | None) -> float:
    """Returns 1, or more where a worker of hop skipped iterations."""
    if not before or not after or "iteration" not in after or after["steps"] == before["steps"]:
        return 1.0
    return float((after["iteration"] - before["iteration"]) / (after["steps"] - before["steps"]))


def fastest_per_second(results: Sequence[dict[str, Any]], window_s: float) -> dict[str, list[float]]:
    """Returns, by contender, the iterations of the fastest rank in a second, one number a repeat."""
    per_rank = [result["runs"] for result in results]
    return {
        name: [max(runs[name][repeat]["iterations"] for runs in per_rank) / window_s for repeat in range(len(first))]
        for name, first in per_rank[0].items()
    }


def gradients_per_second(results: Sequence[dict[str, Any]], window_s: float) -> dict[str, list[float]]:
    """Returns, by contender, the gradients of all ranks together in a second, one number a repeat."""
    per_rank = [result["runs"] for result in results]
    return {
        name: [sum(runs[name][repeat]["steps"] for runs in per_rank) / window_s for repeat in range(len(first))]
        for name, first in per_rank[0].items()
    }


def summarize(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a results file keeps of the runs, by contender: step times by rank, processor time, drift, stats."""
    summary: dict[str, Any] = {}
    for name, first in results[0]["runs"].items():
        runs = [[result["runs"][name][repeat] for result in results] for repeat in range(len(first))]
        flat = [run for repeat in runs for run in repeat]
        summary[name] = {
            "step_ms_by_rank": [[round(run["step_ms"], 2) for run in repeat] for repeat in runs],
            "median_and_longest_ms": [
                [round(run["median_ms"], 2), round(run["longest_ms"], 2)] for run in (repeat[0] for repeat in runs)
            ],
            "cpu_ms_a_step": round(sum(run["cpu_ms"] for run in flat) / len(flat), 3),
            "drift_of_compute": round(sum(run["drift"] for run in flat) / len(flat), 4),
            "largest_error": max(run["error"] for run in flat),
            "stats_of_rank_0": runs[-1][0]["stats"],
            "stats_of_rank_0_before_the_window": runs[-1][0]["stats_before"],
        }
    return summary
