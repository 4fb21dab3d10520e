"""What does a plan save over torch's Schedule1F1B with equal stages? Four hosts at 1 Gb/s, 48 layers that sleep.

Four hosts are network namespaces behind a switch, each link limited both ways (netlab.py); one stage a host. Each layer
sleeps 4 ms for the forward pass, 4 for the gradient of its input, and 4 for that of its weight; 8 micro-batches. With
activations of 1.5 MB a transfer takes 12 ms, with 4 kB next to nothing.

The links are calibrated, and the planner is asked twice: with 1F1B of any depth, and with zero bubble, too. Beside both
run Schedule1F1B and ScheduleGPipe with equal stages, and tables of equal stages and of the plan's stages with other
depths. Predicted times stand beside measured ones; a prediction is taken in the mode in which the plan runs.

Checked first: every weight's gradient has the sum over all micro-batches, each of them once.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/auto/pipeline_plan.py
    python benchmarks/auto/pipeline_plan.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.net.netlab import NetLab
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.emulated import SleepClock
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from torchext import auto
from torchext.auto import json_file, pipeline
from torchext.auto.pipeline import Layer, LayerProfile, PipelinePlan, Placement

LAYERS, STAGES, MICROBATCHES = 48, 4, 8
LAYER_MS = 4.0
ACTIVATIONS = {"4 kB": 1_024, "1.5 MB": 375_000}  # numbers in one
REFERENCE = "Schedule1F1B even"
PLANS = ("plan", "plan zero-bubble")
TARGETS = {("1.5 MB", "plan"): 1.20, ("1.5 MB", "plan zero-bubble"): 1.35, ("4 kB", "plan"): 1.08}
BEST_SHARE = 0.99  # of the best of all that were tried
TOLERANCE = 1e-5


class _Input(torch.autograd.Function):
    """Sleeps for the forward pass, and for the gradient of the input; hands numbers on without a copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: SleepClock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.work(time.perf_counter(), seconds)
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.clock.work(time.perf_counter(), ctx.seconds)
        return gradient, None, None


class _Weight(torch.autograd.Function):
    """Sleeps for the gradient of the weight, which is 1."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, clock: SleepClock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.clock.work(time.perf_counter(), ctx.seconds)
        return torch.ones(()), None, None


class _Joined(torch.autograd.Function):
    """Where both meet: torch starts the gradients of weights here when it takes them apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.new_zeros(())


class SleepingLayer(nn.Module):
    """Takes the time of three passes, and none of the processor."""

    def __init__(self, clock: SleepClock, seconds: float) -> None:
        super().__init__()
        self.weight, self.clock, self.seconds = nn.Parameter(torch.zeros(())), clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Input.apply(x, self.clock, self.seconds)
        return _Joined.apply(x, _Weight.apply(self.weight, self.clock, self.seconds))


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns a loss that takes little time, whatever the size of an activation."""
    return out[..., :1].sum()


def layer_profile(layer_ms: float, numbers: int) -> LayerProfile:
    """Returns what the sleeping layers take; a unit of memory each."""
    return LayerProfile(
        tuple(
            Layer(
                name=str(number),
                forward=layer_ms / 1e3,
                backward_input=layer_ms / 1e3,
                backward_weight=layer_ms / 1e3,
                kept_bytes=1,
                output_bytes=4 * numbers,
                parameter_bytes=4,
            )
            for number in range(LAYERS)
        )
    )


def tried(profile: LayerProfile, link: auto.LinkModel) -> dict[str, PipelinePlan]:
    """Returns name -> plan: the planner's two, and what one would try by hand."""
    options: dict[str, Any] = {"world_size": STAGES, "microbatches": MICROBATCHES, "stages": STAGES}
    plan = pipeline.plan(profile, link, **options)
    with_zero_bubble = pipeline.plan(profile, link, **options, schedules=("1f1b", "zero-bubble"))
    even, strict = [LAYERS // STAGES] * STAGES, list(range(STAGES, 0, -1))

    def by_hand(sizes: Any, depths: Any, order: str = "1f1b") -> PipelinePlan:
        return PipelinePlan.of(profile, link, Placement.by_depth(sizes, depths, MICROBATCHES, order=order))

    return {
        REFERENCE: by_hand(even, strict),
        "ScheduleGPipe even": by_hand(even, [MICROBATCHES] * STAGES, "gpipe"),
        "table of 1F1B even": by_hand(even, strict),
        "deeper even": by_hand(even, [strict[0] + 1, *strict[:-2], 1]),
        "stages of the plan 1F1B": by_hand(plan.sizes, strict),
        "plan": plan,
        "plan zero-bubble": with_zero_bubble,
    }


def mode_of(name: str) -> str:
    """Returns the simulator's mode for what runs a contender."""
    return "class" if name.startswith("Schedule") else "torch"


class Contender:
    """One plan with its schedule, on this rank."""

    def __init__(self, name: str, plan: PipelinePlan, settings: Mapping[str, Any], numbers: int) -> None:
        clock = SleepClock()
        seconds = settings["layer_ms"] / 1e3
        model = nn.Sequential(*(SleepingLayer(clock, seconds) for _ in range(LAYERS)))
        world = dist.group.WORLD
        assert world is not None
        self._stage = plan.stage(model, world)
        if name == REFERENCE:
            self._schedule: Any = Schedule1F1B(self._stage, MICROBATCHES, loss_of)
        else:
            self._schedule = plan.schedule(self._stage, loss_of)
        self._x = torch.zeros(MICROBATCHES, numbers)
        self._steps = settings["steps"]

    def step(self) -> None:
        """Runs the passes of one step."""
        inputs = [self._x] if self._stage.is_first else []
        self._schedule.step(*inputs, target=self._x if self._stage.is_last else None, return_outputs=False)

    def error(self) -> float:
        """Returns how far a weight's gradient is off after one step, the worst of all ranks."""
        parameters = list(self._stage.submod.parameters())
        for parameter in parameters:
            parameter.grad = None
        self.step()
        gradients = [p.grad if p.grad is not None else torch.full((), torch.inf) for p in parameters]
        worst = torch.stack([(gradient - 1).abs() for gradient in gradients]).max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def measure(self) -> float:
        """Returns the milliseconds of the median step; of each step the slowest rank counts."""
        times = []
        for _ in range(self._steps):
            dist.barrier()
            begin = time.perf_counter()
            self.step()
            taken = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times.append(1e3 * taken.item())
        return statistics.median(times)


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function. ``rank.settings``: ``activation``, ``layer_ms``, ``contenders``, ``repeats``, ``steps``."""
    settings, checks = rank.settings, Checks()
    numbers = ACTIVATIONS[settings["activation"]]
    torch.set_num_threads(1)
    with rank.process_group("gloo"):
        link = auto.calibrate(max_seconds=settings["calibration_s"])
        plans = tried(layer_profile(settings["layer_ms"], numbers), link)
        contenders = {name: Contender(name, plans[name], settings, numbers) for name in settings["contenders"]}
        for name, contender in contenders.items():
            checks.confirm(name, contender.error(), TOLERANCE)
        runs = in_turn({name: contender.measure for name, contender in contenders.items()}, settings["repeats"])
    return {
        "runs": runs,
        "checks": checks.done,
        "plans": {
            name: {
                "sizes": plans[name].sizes,
                "depths": plans[name].depths,
                "order": plans[name].placement.order,
                "predicted_ms": 1e3 * plans[name].predict(mode=mode_of(name)).seconds,
                "ideal_ms": 1e3 * plans[name].predict(mode="ideal").seconds,
            }
            for name in settings["contenders"]
        },
        "link": {"latency_ms": 1e3 * link.latency_seconds, "bytes_per_second": link.bytes_per_second},
        "plan": json_file.dumps(plans["plan"]),
    }


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    names = [REFERENCE, "ScheduleGPipe even", "table of 1F1B even", "deeper even", "stages of the plan 1F1B", *PLANS]
    parser = cli.parser(__doc__ or "", contenders=",".join(names), repeats=3)
    parser.add_argument("--activations", default=",".join(ACTIVATIONS), help=f"some of {', '.join(ACTIVATIONS)}")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--layer-ms", type=float, default=LAYER_MS, help="of each of the three passes of a layer")
    parser.add_argument("--steps", type=int, default=4, help="timed in a repeat")
    parser.add_argument("--calibration", type=float, default=5.0, help="seconds, at most")
    parsed = parser.parse_args()
    parsed.contenders = cli.names(parsed.contenders)
    if parsed.quick:
        parsed.repeats, parsed.steps, parsed.calibration, parsed.layer_ms = 1, 1, 2.0, 1.0
    return parsed


def verdicts(activation: str, runs: Mapping[str, list[float]]) -> dict[str, Any]:
    """Prints and returns whether the plans are as fast as asked, and as the best of all that were tried."""
    medians = {name: statistics.median(values) for name, values in runs.items()}
    best = min(medians, key=lambda name: medians[name])
    found: dict[str, Any] = {"best": best}
    for name in PLANS:
        if name not in medians:
            continue
        rivals = {n: ms for n, ms in medians.items() if n not in PLANS or n == name}
        share = min(rivals.values()) / medians[name]
        aim = TARGETS.get((activation, name))
        gain = medians[REFERENCE] / medians[name] if REFERENCE in medians else float("nan")
        found[name] = {"over_reference": gain, "asked": aim, "share_of_best": share, "met": share >= BEST_SHARE}
        found[name]["met"] &= aim is None or gain >= aim
        print(f"{activation}, {name}: {gain:.2f} times {REFERENCE}, asked {aim}; {share:.3f} of the best tried by hand")
    return found


def measure(args: argparse.Namespace, lab: NetLab, report: Report, activation: str) -> str:
    """Measures all contenders with one size of activations; returns the plan as JSON."""
    settings = {
        "activation": activation,
        "layer_ms": args.layer_ms,
        "contenders": args.contenders,
        "repeats": args.repeats,
        "steps": args.steps,
        "calibration_s": args.calibration,
    }
    seconds = 3e-3 * args.layer_ms * LAYERS  # of the slowest step, about
    deadline_s = 120 + 3 * seconds * len(args.contenders) * (args.repeats * args.steps + 3)
    results = launch("pipeline_plan:ranks", ranks=STAGES, settings=settings, deadline_s=deadline_s, lab=lab)
    first = results[0]
    for name, plan in first["plans"].items():
        measured = statistics.median(first["runs"][name])
        plan["error"] = plan["predicted_ms"] / measured - 1
        print(
            f"{activation}, {name}: predicted {plan['predicted_ms']:.0f} ms, measured {measured:.0f}: "
            f"{100 * plan['error']:+.1f} %; stages {plan['sizes']}, in flight {plan['depths']}",
            flush=True,
        )
    report.add(
        f"activations of {activation}",
        first["runs"],
        checks=first["checks"],
        notes={
            "plans": first["plans"],
            "link": first["link"],
            "targets": {name: aim for (size, name), aim in TARGETS.items() if size == activation},
            "verdicts": verdicts(activation, first["runs"]),
        },
    )
    plan_text: str = first["plan"]
    return plan_text


def main() -> None:
    """Measures, and writes ``pipeline_plan.json``, ``.png`` and ``pipeline_plan_steps.png``."""
    args = arguments()
    plan_text = ""
    with NetLab(STAGES, rate=args.rate) as lab:
        report = Report(
            "pipeline_plan",
            script=cli.script_line(),
            unit="ms a step",
            reference=REFERENCE,
            higher_is_better=False,
            conditions={
                "layers": LAYERS,
                "stages": STAGES,
                "microbatches": MICROBATCHES,
                "layer_ms": args.layer_ms,
                "steps": args.steps,
                **lab.describe(),
            },
        )
        for activation in cli.names(args.activations):
            plan_text = measure(args, lab, report, activation)
    report.write(args.results)
    json_file.loads(PipelinePlan, plan_text).timeline(args.results / "pipeline_plan_steps.png")


if __name__ == "__main__":
    main()
