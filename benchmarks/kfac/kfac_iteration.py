"""What does an iteration with K-FAC cost over SGD's? Every strategy, 2 processes over Gloo, real models and compute.

Models: the digits MLP 64-256-256-10, a digits CNN (conv16-conv32-fc64-fc10), an MLP with 1024-wide layers, ResNet-20 on
32 x 32 images; batch 64 a process (16 for ResNet-20). Factors in every step and inverses every 10, and factors every 10
and inverses every 100. `d-kfac` is the plain algorithm: every factor all-reduced by itself, every rank inverts
everything. The committed results are of a `d-kfac` that sent factors in every step; today's sends them where inverses
are made. gpauloski's kfac-pytorch takes part if its package `kfac` can be imported (--contenders
...,kfac-pytorch,kfac-pytorch/inverse).

Checked before it is timed: after some steps each exact strategy holds the parameters of one process that trains on the
whole batch; kfac-pytorch, whose scale is another, only that ranks agree. Bytes and memory of a rank are noted.

    python benchmarks/kfac/kfac_iteration.py
    python benchmarks/kfac/kfac_iteration.py --models mlp --intervals 1/1
    python benchmarks/kfac/kfac_iteration.py --models wide --update  # one case anew, into the results that are there
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.kfac_models import MODELS, make_batch, make_model, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONTENDERS = "sgd,spd,pad,comm-opt,mem-opt,dp,auto,spd/eigen,d-kfac"
# The ratio over SGD that the fastest strategy should reach, as speed.
TARGETS = {("mlp", "1/10"): 1 / 1.5, ("cnn", "1/10"): 1 / 1.7, ("mlp", "10/100"): 1 / 1.15, ("cnn", "10/100"): 1 / 1.15}
CHECK_STEPS = 12
ROWS = {name: 16 if name == "resnet20" else 64 for name in MODELS}


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()


def rank_zero_says(yes: bool) -> bool:
    """What it thinks, on all ranks."""
    said = torch.tensor([yes], dtype=torch.int32)
    dist.broadcast(said, 0)
    return bool(said.item())


class Training:
    """One contender on one model."""

    def __init__(self, rank: Rank, contender: str, model: str) -> None:
        settings = rank.settings
        self.name, self.contender = model, contender
        self.check_steps = int(settings.get("check_steps", CHECK_STEPS))
        self.cycle = int(settings.get("cycle", max(10, int(settings["inverses"]))))
        self.rank, self.size, self.rows = rank.rank, rank.world_size, int(settings["rows"][model])
        self.ddp = DistributedDataParallel(make_model(model))
        self.options = {"lr": 1e-3, "factors": int(settings["factors"]), "inverses": int(settings["inverses"])}
        self.optimizer = make_optimizer(contender, self.ddp, **self.options)
        self.batch = make_batch(model, rank=self.rank, rows=self.rows)

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()

    def error(self, alone: dict[str, torch.Tensor]) -> float:
        """Relative distance to one process with the whole batch; between ranks where there is no such process."""
        for _ in range(self.check_steps):
            self.step()
        own = flat(self.ddp.module)
        if self.contender.startswith(("dp", "kfac-pytorch")) or self.name == "resnet20":
            # Other factors; other scale; batch statistics of its own share of the batch.
            all_ = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(all_, own)
            return float((all_[0] - all_[-1]).abs().max())
        kind = "sgd" if self.contender == "sgd" else "eigen" if "/eigen" in self.contender else "inverse"
        if kind not in alone:
            groups = [dist.new_group([r]) for r in range(self.size)]
            model = make_model(self.name)
            contender = "sgd" if kind == "sgd" else f"spd/{kind}"
            optimizer = make_optimizer(contender, model, **self.options, group=groups[self.rank])
            parts = [make_batch(self.name, rank=r, rows=self.rows) for r in range(self.size)]
            inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
            for _ in range(self.check_steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            alone[kind] = flat(model)
        start = flat(make_model(self.name))
        return float((own - alone[kind]).abs().max() / (alone[kind] - start).abs().max())

    def seconds_of(self, steps: int) -> float:
        """Of so many steps."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - started

    def milliseconds(self, seconds: float) -> float:
        """Of a step: whole cycles of the inverses, for some time. All ranks take as many."""
        dist.barrier()
        started, steps = time.perf_counter(), 0
        while True:
            for _ in range(self.cycle):
                self.step()
            steps += self.cycle
            if not rank_zero_says(time.perf_counter() - started < seconds):
                return (time.perf_counter() - started) / steps * 1e3

    def counters(self) -> dict[str, Any]:
        """Bytes passed to collectives a step, memory, where the time goes."""
        stats = getattr(self.optimizer, "stats", dict)()
        if not stats:
            return {}
        steps = max(1, stats["steps"])
        sent = {key: stats[key] / steps for key in stats if key.endswith("_bytes") and key != "memory_bytes"}
        times = {key.replace("_seconds", "_ms"): 1e3 * stats[key] / steps for key in stats if key.endswith("_seconds")}
        return {
            "bytes_a_step": sent,
            "memory_bytes": stats["memory_bytes"],
            **times,
            "plan": str(self.optimizer.plan()),
        }


def cycles_in_parts(trainings: dict[str, Training], repeats: int, parts: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of a step: whole cycles, for some time each on average, of which all take a part in turn.

    A cycle of a hundred steps may take a minute, in which a shared machine changes: all have the same share of that.
    """
    figures: dict[str, list[float]] = {name: [] for name in trainings}
    turn = {n: lambda t=t: t.seconds_of(t.cycle // parts) for n, t in trainings.items()}
    for _ in range(repeats):
        spent: dict[str, list[float]] = {name: [] for name in trainings}
        more = True
        while more:
            for name, found in in_turn(turn, parts).items():
                spent[name] += found
            more = rank_zero_says(sum(map(sum, spent.values())) < seconds * len(trainings))
        for name, found in spent.items():
            figures[name].append(1e3 * sum(found) / (trainings[name].cycle // parts * len(found)))
    return figures


def ranks(rank: Rank) -> dict[str, Any]:
    """Checks, then times, all contenders on one model after the other."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with rank.process_group("gloo"):
        for model in rank.settings["models"]:
            checks, alone = Checks(), dict[str, torch.Tensor]()
            trainings = {name: Training(rank, name, model) for name in rank.settings["contenders"]}
            for name, training in trainings.items():
                checks.confirm(name, training.error(alone), 0.02)
            window, repeats = float(rank.settings["window_s"]), int(rank.settings["repeats"])
            if parts := int(rank.settings.get("parts", 0)):
                figures = cycles_in_parts(trainings, repeats, parts, window)
            else:
                figures = in_turn({n: lambda t=t: t.milliseconds(window) for n, t in trainings.items()}, repeats)  # noqa: B023
            found[model] = {
                "figures": figures,
                "checks": checks.done,
                "counters": {name: training.counters() for name, training in trainings.items()},
            }
    return found


def measure(report: Report, args: argparse.Namespace, model: str, intervals: str) -> None:
    """One case, of launches of its own: where an optimizer's memory lies makes a difference that stays for one."""
    factors, inverses = map(int, intervals.split("/"))
    settings: dict[str, Any] = {
        "models": [model],
        "contenders": cli.names(args.contenders),
        "repeats": 1 if args.quick else args.repeats,
        "window_s": 0.2 if args.quick else args.window,
        "factors": factors,
        "inverses": inverses,
        "rows": ROWS,
    }
    figures: dict[str, list[float]] = {}
    for _ in range(1 if args.quick else args.launches):
        found = launch("kfac_iteration:ranks", ranks=2, settings=settings, deadline_s=900)[0][model]
        for name, values in found["figures"].items():
            figures.setdefault(name, []).extend(values)
    report.add(
        f"{model}, factors/inverses every {intervals}",
        figures,
        checks=found["checks"],
        target=TARGETS.get((model, intervals)),
        notes={"counters": found["counters"]},
    )
    base = figures.get("sgd")
    for name, values in figures.items():
        counters = found["counters"][name]
        ratio = f"{statistics.median(a / b for a, b in zip(values, base, strict=True)):.2f} x SGD" if base else ""
        sent = sum(counters.get("bytes_a_step", {}).values())
        memory = counters.get("memory_bytes", 0) / 1e6
        print(f"{model:<10} {name:<22} {ratio:<12} {sent / 1e3:9.1f} kB/step  {memory:7.2f} MB", flush=True)


def main() -> None:
    """Runs the launches and writes the results."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=7)
    parser.add_argument("--models", default="mlp,cnn,wide,resnet20", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--intervals", default="1/10,10/100", help="steps from one update of the factors to the next / of the inverses"
    )
    parser.add_argument("--window", type=float, default=0.6, help="seconds of each repeat, at least one whole interval")
    parser.add_argument("--launches", type=int, default=1, help="so many times the repeats, each in new processes")
    parser.add_argument("--update", action="store_true", help="keep the other cases of the results that are there")
    args = parser.parse_args()
    report = Report(
        "kfac_iteration",
        script=cli.script_line(),
        unit="ms/iteration",
        reference="sgd",
        higher_is_better=False,
        conditions={"processes": 2, "threads": 1, "rows": ROWS, "window_s": args.window},
    )
    for model in cli.names(args.models):
        for intervals in cli.names(args.intervals):
            measure(report, args, model, intervals)
    if args.update:
        report.keep(args.results / f"{report.name}.json")
    report.write(args.results)


if __name__ == "__main__":
    main()
