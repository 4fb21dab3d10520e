"""Training by "hop": equal to the paper's equations computed in one process; slow workers, within its bounds."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import Normalized, equal_everywhere, everywhere, flat
from harness import Rank, run_ranks
from hop_reference import ORDERS, Reference, Trainer, hop, out_neighbours, uniform
from rows import row, values_in_one_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

TOLERANCE = 1e-9  # float64: rounding of some sums; the figure to hold is 1e-6


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


# ---- Exact ----


def body_exact(rank: Rank) -> None:
    for graph, order in itertools.product(("ring", "ring-based", "exponential", "full", "double-ring"), ORDERS):
        if graph == "double-ring" and rank.size % 2:
            continue  # refused: test_hop_errors.py
        with row(graph, order):
            weights = uniform(out_neighbours(graph, rank.size))
            trainer = Trainer(rank, graph=graph, order=order)
            reference = Reference(weights, order).run(12)
            trainer.run(12)
            trainer.sync.wait()
            close(flat(trainer.module), reference.flat(rank.rank))
            stats = trainer.sync.stats()
            assert stats["steps"] == stats["iteration"] == 12 and stats["skipped"] == 0, stats
            assert stats["averages"] == 12 and stats["group_sizes"] == {int((weights[:, rank.rank] > 0).sum()): 12}
            assert set(stats["ages"]) == {0} and max(stats["gaps"]) <= stats["gap_bound"] == 1, stats
            trainer.sync.detach()
            # 12, or in the parallel order 13, the last one only if its receiver had not left.
            sent = trainer.sync.stats()["bytes_sent"] / (8 * flat(trainer.module).numel())
            assert 12 <= sent / len(set(out_neighbours(graph, rank.size)[rank.rank]) - {rank.rank}) < 14, sent


@pytest.mark.parametrize("size", [2, 3, 4])
def test_standard_mode_is_the_papers_equation(size: int) -> None:
    values_in_one_group({"exact": (body_exact,)}, size, backend="hop")


def body_other_protocols(rank: Rank) -> None:
    """Tokens and acknowledgements bound the gap, and change no number."""
    weights = uniform(out_neighbours("ring-based", rank.size))
    for order in ORDERS:
        reference = Reference(weights, order).run(15).flat(rank.rank)
        for options in ({"max_iteration_gap": 1}, {"max_iteration_gap": 3}, {"notify_ack": True}):
            with row(order, options):
                trainer = Trainer(rank, order=order, **options)
                for step in range(15):
                    time.sleep(0.003 * ((step + rank.rank) % 3))
                    trainer.step()
                trainer.sync.wait()
                close(flat(trainer.module), reference)
                trainer.sync.detach()


# A path 0 - 1 - 2 - 3: Metropolis weights 1 / max(degree), degrees 2, 3, 3, 2 with self loops.
PATH = [[1], [0, 2], [1, 3], [2]]
PATH_WEIGHTS = torch.tensor(
    [[2 / 3, 1 / 3, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [0, 1 / 3, 1 / 3, 1 / 3], [0, 0, 1 / 3, 2 / 3]],
    dtype=torch.float64,
)
# Directed: 0 -> 1 -> 2 -> 3 -> 0, with unequal shares.
CYCLE_WEIGHTS = torch.tensor(
    [[0.6, 0.4, 0, 0], [0, 0.6, 0.4, 0], [0, 0, 0.6, 0.4], [0.4, 0, 0, 0.6]], dtype=torch.float64
)


def body_own_graphs(rank: Rank) -> None:
    """A user's graph and weights."""
    for order in ORDERS:
        for options, weights in (
            ({"neighbours": PATH}, PATH_WEIGHTS),
            ({"weights": CYCLE_WEIGHTS.tolist()}, CYCLE_WEIGHTS),
        ):
            with row(order, options):
                trainer = Trainer(rank, order=order, **options)
                trainer.run(10)
                trainer.sync.wait()
                close(flat(trainer.module), Reference(weights, order).run(10).flat(rank.rank))
                trainer.sync.detach()


def test_tokens_acknowledgements_and_a_users_graph() -> None:
    values_in_one_group(
        {"other protocols": (body_other_protocols,), "own graphs": (body_own_graphs,)}, 4, backend="hop"
    )


def body_batch_norm(rank: Rank) -> None:
    """Statistics are averaged."""
    for order in ORDERS:
        trainer = Trainer(rank, model=Normalized(), order=order)
        assert not trainer.ddp.broadcast_buffers
        reference = Reference(uniform(out_neighbours("ring-based", rank.size)), order, model=Normalized()).run(9)
        trainer.run(9)
        trainer.sync.wait()
        close(flat(trainer.module), reference.flat(rank.rank))
        for actual, expected in zip(trainer.module.buffers(), reference.models[rank.rank].buffers(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
        trainer.sync.synchronize()
        for buffer in (trainer.module.norm.running_mean, trainer.module.norm.running_var):
            all_ = everywhere(buffer)
            assert (all_ == all_[0]).all()
        trainer.sync.detach()


def body_element_types(rank: Rank) -> None:
    """A model of several element types, every one averaged in its own."""
    torch.manual_seed(0)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Sizes that leave rests behind every block of the loops.
            self.parts = nn.ParameterList(
                nn.Parameter(torch.randn(1000 * i + 137).to(dtype)) for i, dtype in enumerate(types)
            )

        def forward(self) -> torch.Tensor:
            return sum(part.float().sum() for part in self.parts)

    for order in ORDERS:
        ddp = DistributedDataParallel(Mixed(), process_group=hop(graph="full", order=order), init_sync=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        sync = torchext.attach(ddp, optimizer)
        with torch.no_grad():
            for part in ddp.module.parts:
                part.add_(rank.rank)
        means = [everywhere(part.detach().double()).mean(0) for part in ddp.module.parts]
        ddp().backward()
        optimizer.step()
        sync.wait()
        for part, mean, dtype in zip(ddp.module.parts, means, types, strict=True):
            assert part.dtype == dtype
            tolerance = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(part.detach().double(), mean, rtol=tolerance, atol=tolerance)
        sync.detach()


def test_batch_norm_and_element_types() -> None:
    values_in_one_group({"batch norm": (body_batch_norm,), "element types": (body_element_types,)}, 3, backend="hop")


# ---- What a training loop does besides ----


def body_in_between(rank: Rank) -> bool:
    """Averages, collectives of the user, accumulation and a resumed run leave the numbers as they are."""
    rank.init("hop")
    weights = uniform(out_neighbours("ring", rank.size))
    for order in ORDERS:
        reference = Reference(weights, order)
        trainer = Trainer(rank, graph="ring", order=order)
        for _ in range(3):
            for _ in range(4):
                trainer.step()
                loss = torch.ones(3)
                dist.all_reduce(loss)
                dist.all_reduce(loss, group=trainer.group)
                assert loss.tolist() == [float(rank.size**2)] * 3
            reference.run(4)
            with trainer.sync.averaged() as module:
                close(flat(module), reference.mean())
                equal_everywhere(module)
                with pytest.raises(RuntimeError, match=r"averaged\(\)"):
                    trainer.optimizer.step()
            close(flat(trainer.module), reference.flat(rank.rank))
            assert 0 < trainer.sync.stats()["consensus_distance"] < 1
        # Copied, as a file would: load_state_dict shares the momentum.
        saved = copy.deepcopy((trainer.module.state_dict(), trainer.optimizer.state_dict(), trainer.sync.state_dict()))
        assert saved[2] == {"version": 1, "steps": 12}
        resumed = Trainer(rank, graph="ring", order=order)
        resumed.module.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        resumed.sync.load_state_dict(saved[2])
        resumed.step_count = 12
        assert isinstance(resumed.sync, torchext.HopSynchronizer)
        assert resumed.sync.iteration == 12
        reference.run(5)
        for one in (trainer, resumed):
            one.run(5)
            one.sync.wait()
            close(flat(one.module), reference.flat(rank.rank))
            assert one.sync.iteration == 17
        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        close(flat(trainer.module), reference.mean())
        trainer.sync.detach()
        resumed.sync.detach()
    return True


def test_averages_collectives_and_checkpoints_in_between() -> None:
    assert run_ranks(body_in_between, 4) == [True] * 4


def body_uneven(rank: Rank) -> bool:
    """Ranks that make different numbers of steps meet in every collective call of the synchronizer."""
    rank.init("hop")
    for options in ({}, {"max_iteration_gap": 2}, {"notify_ack": True}, {"staleness": 2}, {"graph": "exponential"}):
        for order in ORDERS:
            trainer = Trainer(rank, order=order, **options)
            trainer.run(3 + 5 * rank.rank)
            with trainer.sync.averaged() as module:
                equal_everywhere(module)
            trainer.run(2 * (rank.size - 1 - rank.rank))  # none at all on the last rank
            trainer.sync.synchronize()
            equal_everywhere(trainer.module)
            trainer.sync.synchronize()
            trainer.run(rank.rank)
            trainer.sync.detach()
            assert trainer.sync.stats()["steps"] == 3 + 5 * rank.rank + 2 * (rank.size - 1 - rank.rank) + rank.rank
    return True


def test_different_numbers_of_steps() -> None:
    assert run_ranks(body_uneven, 4) == [True] * 4


def body_leaves_early(rank: Rank) -> bool:
    rank.init("hop")
    for order in ORDERS:
        trainer = Trainer(rank, graph="ring", order=order)
        # Parallel: the model of iteration 5 has gone out when its compute would begin.
        reference = Reference(
            uniform(out_neighbours("ring", rank.size)), order, last={1: 5 if order == "parallel" else 4}
        )
        trainer.run(5 if rank.rank == 1 else 14)
        trainer.sync.detach()
        trainer.sync.detach()
        close(flat(trainer.module), reference.run(5 if rank.rank == 1 else 14).flat(rank.rank))
        stats = trainer.sync.stats()
        if rank.rank != 1:
            sizes = {0: {2, 3}, 2: {2, 3}, 3: {3}}[rank.rank]  # of a ring of four: 3 is opposite of 1
            assert set(stats["group_sizes"]) == sizes, stats
        before = flat(trainer.module)
        trainer.step()
        assert (flat(trainer.module) != before).any() and trainer.sync.stats()["steps"] == stats["steps"]
        with pytest.raises(RuntimeError, match=r"after detach\(\)"):
            trainer.sync.synchronize()
    return True


def test_a_worker_that_leaves_early_holds_nobody_back() -> None:
    assert run_ranks(body_leaves_early, 4) == [True] * 4


# ---- Slow workers ----

ITERATIONS = 40
SLOW = 3
SLOW_SECONDS = 0.100  # of a step; the others take 2 ms, and on a loaded machine 40
MODES: dict[str, dict[str, Any]] = {
    "backup": {"backup_workers": 1, "max_iteration_gap": 4},
    "staleness": {"staleness": 3, "max_iteration_gap": 5},
    "staleness without tokens": {"staleness": 3},
    "backup and skipping": {"backup_workers": 1, "max_iteration_gap": 4, "max_jump": 10},
    "staleness and skipping": {"staleness": 3, "max_iteration_gap": 5, "max_jump": 10, "jump_trigger": 2},
}


def slowed(rank: Rank, options: dict[str, Any], order: str) -> dict[str, Any]:
    trainer = Trainer(rank, order=order, lr=0.02, **options)
    start = time.monotonic()
    losses = []
    while trainer.sync.iteration < ITERATIONS:
        time.sleep(SLOW_SECONDS if rank.rank == SLOW else 0.002)
        losses.append(trainer.step())
    seconds = time.monotonic() - start
    stats = trainer.sync.stats()
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
    distance = trainer.sync.stats()["consensus_distance"]
    trainer.sync.detach()
    return {**stats, "seconds": seconds, "distance": distance}


def body_slow(rank: Rank, first: int) -> dict[str, dict[str, Any]]:
    dist.set_debug_level(dist.DebugLevel.INFO)  # workers assert the bound on the gap in every iteration
    rank.init("hop")
    found = {}
    for place, (mode, options) in enumerate(MODES.items(), first):
        with row(mode, ORDERS[place % 2]):
            found[mode] = slowed(rank, options, ORDERS[place % 2])
    return found


# The order of the first mode; they alternate. The other way round the orders' code is the same.
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_slow_worker_within_the_bounds(first: int) -> None:
    of_ranks = run_ranks(body_slow, 4, first, deadline=150)
    for mode in MODES:
        with row(mode):
            check_bounds(MODES[mode], [found[mode] for found in of_ranks])


def check_bounds(options: dict[str, Any], all_: list[dict[str, Any]]) -> None:
    for rank, stats in enumerate(all_):
        assert stats["steps"] + stats["skipped"] == stats["iteration"] >= ITERATIONS, stats
        assert max(stats["gaps"]) <= stats["gap_bound"], stats
        assert max(stats["ages"]) <= options.get("staleness", 0), stats
        # 0 where the last average was of the newest of all: each hears each.
        assert 0 <= stats["distance"] < 0.5, stats
        if rank != SLOW:
            assert stats["skipped"] == 0 or "max_jump" in options, stats
            assert max(stats["gaps"]) >= 1, stats  # somebody was ahead of the slow one
            if "backup_workers" in options:
                assert min(stats["group_sizes"]) == 3 and stats["too_late"] + all_[SLOW]["not_sent"] > 0, stats
            else:
                assert max(stats["ages"]) > 0, stats
    slow = all_[SLOW]
    if "max_jump" in options:
        assert slow["skipped"] > ITERATIONS / 4, slow
        # Nobody waits for all the slow steps.
        assert all_[0]["seconds"] < SLOW_SECONDS * ITERATIONS, [stats["seconds"] for stats in all_]
    else:
        assert slow["skipped"] == 0
