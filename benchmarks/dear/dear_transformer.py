"""Does dear train a real model sooner, to the same losses? A small Transformer on text, two hosts at 300 Mb/s.

Real compute on one thread a process, float32, AdamW: 4.8 million parameters (19 MB), bytes of Python's manual
(language.py). All contenders take the same steps on the same batches, so their loss curves lie on each other but
for rounding. Samples a second are those of the last steps, after dear's tuner had the ones before; steps are timed
from end to end without barriers, in which communication could be finished for nothing. Rate and batch are such that
compute takes about as long as communication: elsewhere there is less to hide, or less to hide it behind.

The check before timing: after six steps the parameters are those of one process that trains on both ranks' batches.

    python benchmarks/dear/dear_transformer.py
    python benchmarks/dear/dear_transformer.py --contenders ddp,ddp:4,zero,fsdp2  # without torchext
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.net.netlab import NetLab
from lab.report import bounds, plot
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads import language, reference
from lab.workloads.contenders import Contender, contender
from torch import nn

CONTENDERS = "ddp,ddp:4,dear:sharded/2,dear:sharded/auto"
MODEL = {"layers": 6, "width": 256, "heads": 4, "length": 128}
HOSTS = 2
SEED = 0
CHECK_STEPS = 6
TOLERANCE = 1e-3  # of the distance gone in the check; a wrong average is off by more than a tenth
TARGET = 1.2
TARGET_LOSS = 1e-4
MAKE_OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3)


def make_model() -> nn.Module:
    """Returns the model, the same on all ranks and in all repeats."""
    torch.manual_seed(SEED)
    return language.LanguageModel(**MODEL)


def loss_of(model: nn.Module, rank: int, step: int, samples: int) -> torch.Tensor:
    """Returns the loss of a rank's batch of a step."""
    loss: torch.Tensor = model(language.batch(SEED, rank, step, samples=samples, length=MODEL["length"]))
    return loss


def measure_compute(samples: int, rank: Rank, steps: int = 8) -> dict[str, float]:
    """Returns the milliseconds of forward, of backward and of the optimizer with no communication, medians."""
    model = make_model()
    optimizer = MAKE_OPTIMIZER(model.parameters())
    spans: dict[str, list[float]] = {"forward_ms": [], "backward_ms": [], "optimizer_ms": []}
    rank.board.barrier()  # all ranks compute at the same time, as they will in training
    for step in range(steps):
        optimizer.zero_grad()
        begin = time.perf_counter()
        loss = loss_of(model, rank.rank, step, samples)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = time.perf_counter()
        optimizer.step()
        ends = (forward - begin, backward - forward, time.perf_counter() - backward)
        for name, span in zip(spans, ends, strict=True):
            spans[name].append(span * 1e3)
    rank.board.barrier()
    return {name: statistics.median(values[2:]) for name, values in spans.items()}


def check(which: Contender, rank: Rank, checks: Checks, samples: int) -> None:
    """Compares some steps with those of one process; dear may not train as plain DDP meanwhile."""
    tried = which.without_fallback()
    loss = functools.partial(loss_of, samples=samples)
    model = make_model()
    start = [weight.detach().clone() for weight in model.parameters()]
    expected = reference.train_alone(model, MAKE_OPTIMIZER, loss, world_size=rank.world_size, steps=CHECK_STEPS)
    with rank.process_group(tried.backend, tried.pg_options()):
        training = tried.prepare(model, MAKE_OPTIMIZER)
        training.attach()
        for step in range(CHECK_STEPS):
            training.optimizer.zero_grad()
            loss(training.model, rank.rank, step).backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
        checks.confirm(which.name, reference.distance(training, start, expected), TOLERANCE)
        training.detach()


def train(which: Contender, rank: Rank, checks: Checks, *, samples: int, steps: int, timed: int) -> dict[str, Any]:
    """Trains ``steps`` steps; returns the loss of each, and the samples a second of the last ``timed`` of them."""
    if which.name not in checks.done:
        check(which, rank, checks, samples)
    with rank.process_group(which.backend, which.pg_options()):
        training = which.prepare(make_model(), MAKE_OPTIMIZER)
        training.attach()
        losses: list[float] = []
        ends = [time.monotonic()]
        stats_before = None
        for step in range(steps):
            if step == steps - timed:
                checks.require(which.name)
                stats_before = training.stats()
            training.optimizer.zero_grad()
            loss = loss_of(training.model, rank.rank, step, samples)
            loss.backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
            losses.append(loss.item())
            ends.append(time.monotonic())
        stats = training.stats()
        training.settle()
        training.detach()
    step_s = (ends[-1] - ends[-1 - timed]) / timed
    return {
        "samples_s": rank.world_size * samples / step_s,
        "step_ms": step_s * 1e3,
        "losses": losses,
        "stats": stats,
        "stats_before": stats_before,
    }


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function. ``rank.settings``: ``contenders``, ``repeats``, ``samples``, ``steps``, ``timed``."""
    torch.set_num_threads(1)
    settings, checks = rank.settings, Checks()
    compute = measure_compute(settings["samples"], rank)
    spans = {name: settings[name] for name in ("samples", "steps", "timed")}
    measures = {
        which.name: functools.partial(train, which, rank, checks, **spans)
        for which in map(contender, settings["contenders"])
    }
    return {"compute": compute, "runs": in_turn(measures, settings["repeats"]), "checks": checks.done}


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=3)
    parser.add_argument("--rate", default="300mbit", help="of each host's link, both ways")
    parser.add_argument("--samples", type=int, default=6, help="a rank and step, of 128 symbols")
    parser.add_argument("--steps", type=int, default=255, help="of each contender, each repeat; dear decides in 215")
    parser.add_argument("--timed", type=int, default=40, help="the last of them, that are timed")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.steps, parsed.timed = 1, 20, 6
    if not 0 < parsed.timed < parsed.steps:
        parser.error("--timed must be at least 1 and less than --steps")
    return parsed


def loss_difference(results: list[dict[str, Any]], name: str) -> float:
    """Returns the largest difference between the losses of ``name`` and of ddp: all steps, ranks and repeats."""
    differences: list[float] = [
        abs(mine - plain)
        for result in results
        for run, other in zip(result["runs"][name], result["runs"]["ddp"], strict=True)
        for mine, plain in zip(run["losses"], other["losses"], strict=True)
    ]
    return max(differences)


def comparisons(results: list[dict[str, Any]], report: Report) -> dict[str, Any]:
    """Prints and returns, by contender, the loss difference and the speed, beside what is asked of dear."""
    found: dict[str, Any] = {}
    if "ddp" not in results[0]["runs"]:
        return found
    for name, ratio in report.cases[-1].ratios.items():
        apart = loss_difference(results, name)
        found[name] = {"largest_loss_difference": apart, "asked": TARGET_LOSS, "speed": ratio.median}
        said = "met" if apart <= TARGET_LOSS and ratio.median >= TARGET else "MISSED"
        asked = f", asked {TARGET_LOSS:g} and x {TARGET:g}: {said}" if name.startswith("dear") else ""
        print(f"{name}: losses at most {apart:.2g} from ddp's, speed x {ratio}{asked}")
    return found


def main() -> None:
    """Trains and writes ``dear_transformer.json`` and ``.png``."""
    args = arguments()
    contenders = cli.names(args.contenders)
    settings = {
        "contenders": contenders,
        **{name: getattr(args, name) for name in ("repeats", "samples", "steps", "timed")},
    }
    parameters = sum(weight.numel() for weight in make_model().parameters())
    with NetLab(HOSTS, rate=args.rate) as lab:
        network = lab.describe()
        rate = max(lab.measure_rate(0, 1), lab.measure_rate(1, 0)) if lab.emulated else None
        report = Report(
            "dear_transformer",
            script=cli.script_line(),
            unit="samples/s",
            reference="ddp",
            conditions={
                **settings,
                **MODEL,
                **language.describe_text(),
                **network,
                "parameters": parameters,
                "optimizer": "AdamW",
                "threads": 1,
                "measured_bit_s": rate,
            },
        )
        deadline_s = 240 + len(contenders) * args.repeats * (20 + 5 * args.steps)
        results = launch("dear_transformer:ranks", ranks=HOSTS, settings=settings, deadline_s=deadline_s, lab=lab)
    notes: dict[str, Any] = {
        "compute_ms": [result["compute"] for result in results],
        "step_ms": {name: [run["step_ms"] for run in runs] for name, runs in results[0]["runs"].items()},
        "stats": {name: runs[-1]["stats"] for name, runs in results[0]["runs"].items()},
        "stats_before_the_timed": {name: runs[-1]["stats_before"] for name, runs in results[0]["runs"].items()},
        "losses_of_rank_0": {name: runs[0]["losses"] for name, runs in results[0]["runs"].items()},
    }
    if rate is not None:
        forward, backward = (max(r["compute"][name] for r in results) for name in ("forward_ms", "backward_ms"))
        half = bounds.reduce_scatter_ms(HOSTS, 4 * parameters, rate)
        step = {
            "dear": bounds.dear_step_ms(forward, backward, half),
            "ddp": bounds.ddp_step_ms(forward, backward, half),
        }
        notes["bounds_ms"] = {"half": half, "forward": forward, "backward": backward, **step}
        print(f"compute alone and bounds, ms: { ({key: round(ms) for key, ms in notes['bounds_ms'].items()}) }")
    figures = {name: [run["samples_s"] for run in runs] for name, runs in results[0]["runs"].items()}
    report.add(f"{HOSTS} hosts, {args.rate}", figures, checks=results[0]["checks"], target=TARGET, notes=notes)
    notes_of_case = report.cases[-1].notes
    notes_of_case["verdicts"] = comparisons(results, report)

    def curves(axes: Any) -> None:
        for index, (name, losses) in enumerate(notes["losses_of_rank_0"].items()):
            axes.plot(losses, label=name, color=f"C{index}", linewidth=3 - index * 2 / len(figures))
        axes.set(xlabel="step", ylabel="loss of rank 0, nats a byte")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")

    def picture(drawn: Report, path: Path) -> None:
        plot.draw(drawn, path, extra=curves)

    report.write(args.results, picture=picture)


if __name__ == "__main__":
    main()
