"""What does a plan save over torch's Schedule1F1B with equal stages? Four hosts at 1 Gb/s, 48 layers that sleep.

Four hosts are network namespaces behind a switch, each link limited both ways (netlab.py); one stage a host. Each layer
sleeps 4 ms for the forward pass, 4 for the gradient of its input, and 4 for that of its weight; 8 micro-batches. With
activations of 1.5 MB a transfer takes 12 ms, with 4 kB next to nothing.

The links are calibrated, the layers are measured, and the planner is asked twice: with 1F1B of any depth, and with zero
bubble, too. Beside both run Schedule1F1B and ScheduleGPipe with equal stages, and tables of equal stages and of the
plan's stages with other depths. Predicted times stand beside measured ones. A prediction is taken in the mode in which
the plan runs, and the output says which ones are off by more than 15 %.

Checked first: every weight's gradient has the sum over all micro-batches, each of them once.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/auto/pipeline_plan.py
    python benchmarks/auto/pipeline_plan.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.net.netlab import NetLab
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.sleeping_pipeline import TOLERANCE, SleepingPipeline, profile_of_first

from torchext import auto
from torchext.auto import json_file, pipeline
from torchext.auto.pipeline import LayerProfile, PipelinePlan, Placement

LAYERS, STAGES, MICROBATCHES = 48, 4, 8
LAYER_MS = 4.0
ACTIVATIONS = {"4 kB": 1_024, "1.5 MB": 375_000}  # numbers in one
REFERENCE = "Schedule1F1B even"
PLANS = ("plan", "plan zero-bubble")
TARGETS = {("1.5 MB", "plan"): 1.20, ("1.5 MB", "plan zero-bubble"): 1.35, ("4 kB", "plan"): 1.08}
BEST_SHARE = 0.99  # of the best of all that were tried
MOST_ERROR = 0.15  # of a prediction


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


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function. ``rank.settings``: ``activation``, ``layer_ms``, ``contenders``, ``repeats``, ``steps``."""
    settings, checks = rank.settings, Checks()
    numbers = ACTIVATIONS[settings["activation"]]
    torch.set_num_threads(1)
    with rank.process_group("gloo"):
        link = auto.calibrate(max_seconds=settings["calibration_s"])
        profile = profile_of_first(LAYERS, settings["layer_ms"], numbers)
        plans = tried(profile, link)
        contenders = {
            name: SleepingPipeline(plans[name], settings["layer_ms"], numbers, of_torch=name == REFERENCE)
            for name in settings["contenders"]
        }
        for name, contender in contenders.items():
            checks.confirm(name, contender.error(), TOLERANCE)
        runs = in_turn(
            {name: lambda c=contender: c.measure(settings["steps"]) for name, contender in contenders.items()},
            settings["repeats"],
        )
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
        "link": {
            "latency_ms": 1e3 * link.latency_seconds,
            "bytes_per_second": link.bytes_per_second,
            "transfer_ms": 1e3 * link.seconds("p2p", 4 * numbers),
        },
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
        far = "" if abs(plan["error"]) <= MOST_ERROR else f", more than {100 * MOST_ERROR:.0f} % off"
        print(
            f"{activation}, {name}: predicted {plan['predicted_ms']:.0f} ms, measured {measured:.0f}: "
            f"{100 * plan['error']:+.1f} %{far}; stages {plan['sizes']}, in flight {plan['depths']}",
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
