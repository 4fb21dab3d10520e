"""How close do predicted steps of pipelines come to measured ones? Thirty plans on each of three links.

Four hosts are network namespaces behind a switch, each link limited both ways (netlab.py); one stage a host, and layers
that sleep in each of their three passes. Plans are every mix of stages and depths that one would try: equal, front- and
back-loaded and random stages, each with the depths of 1F1B, with deeper ones and with all micro-batches; orders of
zero bubble under rising limits of memory; and torch's own Schedule1F1B. Links and layers are measured as a user does.

A prediction should be within 15 % of the median step, nine of ten within 7 %, and the median within 4 %. Of two plans
whose measured steps are more than 3 % apart, the faster one should be predicted to be faster.

Checked first: every weight's gradient has the sum over all micro-batches, and all ranks predict the same.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/auto/pipeline_prediction.py
    python benchmarks/auto/pipeline_prediction.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.net.netlab import NetLab
from lab.report.plot import title
from lab.report.results import Checks, Report
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.sleeping_pipeline import KEPT_BYTES, TOLERANCE, SleepingPipeline, profile_of_first

from torchext import auto
from torchext.auto import pipeline
from torchext.auto.pipeline import LayerProfile, PipelinePlan, Placement

LAYERS, STAGES, MICROBATCHES = 32, 4, 8
LAYER_MS = 2.0
LINKS = {  # name -> rate, numbers in an activation
    "4 kB at 1 Gb/s": ("1gbit", 1_024),
    "1.5 MB at 1 Gb/s": ("1gbit", 375_000),
    "0.5 MB at 200 Mb/s": ("200mbit", 125_000),
}
SIZES = ((8, 8, 8, 8), (11, 8, 7, 6), (10, 9, 7, 6), (6, 7, 8, 11), (7, 9, 9, 7))
DEPTHS = {"1F1B": (4, 3, 2, 1), "one deeper": (5, 4, 3, 1), "deep": (7, 5, 3, 1), "GPipe": (8, 8, 8, 8)}
RANDOM_PLANS = 4
IN_FLIGHT = (4, 5, 6, 8)  # of zero bubble, times the layers of an equal stage
MOST_ERROR, USUAL_ERROR, MEDIAN_ERROR = 0.15, 0.07, 0.04
APART = 0.03


def plans_of(profile: LayerProfile, link: auto.LinkModel) -> dict[str, PipelinePlan]:
    """Returns name -> plan; those whose name begins with "Schedule" are run by torch's class."""

    def by_depth(sizes: Sequence[int], depths: Sequence[int]) -> PipelinePlan:
        return PipelinePlan.of(profile, link, Placement.by_depth(sizes, depths, MICROBATCHES))

    plans = {
        f"{name} on {'+'.join(map(str, sizes))}": by_depth(sizes, depths)
        for sizes in SIZES
        for name, depths in DEPTHS.items()
    }
    draw = random.Random(1)
    for number in range(RANDOM_PLANS):
        cuts = [0, *sorted(draw.sample(range(1, LAYERS), STAGES - 1)), LAYERS]
        depths = sorted((draw.randint(1, MICROBATCHES) for _ in range(STAGES)), reverse=True)
        plans[f"random {number}"] = by_depth([b - a for a, b in itertools.pairwise(cuts)], depths)
    share = LAYERS // STAGES
    for depth in IN_FLIGHT:
        found = pipeline.plan(
            profile,
            link,
            world_size=STAGES,
            microbatches=MICROBATCHES,
            stages=STAGES,
            schedules=("zero-bubble",),
            memory=share * (KEPT_BYTES * depth + 4 * profile.layers[0].parameter_bytes),
        )
        plans[f"zero bubble, {depth} in flight"] = found
    for sizes in SIZES[:2]:
        plans[f"Schedule1F1B on {'+'.join(map(str, sizes))}"] = by_depth(sizes, DEPTHS["1F1B"])
    return plans


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function. ``rank.settings``: ``numbers``, ``layer_ms``, ``steps``, ``plans``, ``calibration_s``."""
    settings, checks = rank.settings, Checks()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with rank.process_group("gloo"):
        link = auto.calibrate(max_seconds=settings["calibration_s"])
        profile = profile_of_first(LAYERS, settings["layer_ms"], settings["numbers"])
        for name, plan in itertools.islice(plans_of(profile, link).items(), 0, None, settings["every"]):
            of_torch = name.startswith("Schedule")
            predicted = 1e3 * plan.predict(mode="class" if of_torch else None).seconds
            both = torch.tensor([predicted, -predicted], dtype=torch.float64)
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            checks.confirm(f"predicted, {name}", float(both.sum()), 1e-9)
            run = SleepingPipeline(plan, settings["layer_ms"], settings["numbers"], of_torch=of_torch)
            checks.confirm(f"measured, {name}", run.error(), TOLERANCE)
            found[name] = {
                "predicted": predicted,
                "measured": run.measure(settings["steps"]),
                "sizes": plan.sizes,
                "depths": plan.depths,
            }
    return {
        "plans": found,
        "checks": checks.done,
        "transfer_ms": 1e3 * link.seconds("p2p", 4 * settings["numbers"]),
    }


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders="predicted,measured", repeats=1)
    parser.add_argument("--links", default=",".join(LINKS), help=f"some of {', '.join(LINKS)}")
    parser.add_argument("--layer-ms", type=float, default=LAYER_MS, help="of each of the three passes of a layer")
    parser.add_argument("--steps", type=int, default=3, help="timed of each plan")
    parser.add_argument("--calibration", type=float, default=5.0, help="seconds, at most")
    parsed = parser.parse_args()
    parsed.every = 1
    if parsed.quick:
        parsed.steps, parsed.calibration, parsed.every = 1, 3.0, 6
    return parsed


def verdict(plans: dict[str, Any]) -> dict[str, Any]:
    """Returns how far predictions are off, whether that is as asked, and pairs that were put in the wrong order."""
    errors = {name: one["predicted"] / one["measured"] - 1 for name, one in plans.items()}
    sizes = sorted(abs(error) for error in errors.values())
    usual = sizes[max(0, -(-9 * len(sizes) // 10) - 1)]
    apart = [
        (fast, slow)
        for fast, slow in itertools.permutations(plans, 2)
        if plans[fast]["measured"] * (1 + APART) < plans[slow]["measured"]
    ]
    wrong = [pair for pair in apart if plans[pair[0]]["predicted"] >= plans[pair[1]]["predicted"]]
    return {
        "errors": errors,
        "largest": sizes[-1],
        "nine_of_ten": usual,
        "median": statistics.median(sizes),
        "pairs": len(apart),
        "wrong_order": wrong,
        "met": sizes[-1] <= MOST_ERROR and usual <= USUAL_ERROR and statistics.median(sizes) <= MEDIAN_ERROR,
    }


def measure(args: argparse.Namespace, report: Report, name: str) -> None:
    """Runs all plans on one link."""
    rate, numbers = LINKS[name]
    settings = {
        "numbers": numbers,
        "layer_ms": args.layer_ms,
        "steps": args.steps,
        "every": args.every,
        "calibration_s": args.calibration,
    }
    with NetLab(STAGES, rate=rate) as lab:
        found = launch("pipeline_prediction:ranks", ranks=STAGES, settings=settings, deadline_s=400, lab=lab)[0]
    plans, result = found["plans"], verdict(found["plans"])
    for plan, one in plans.items():
        print(f"{name}, {plan}: predicted {one['predicted']:.0f}, measured {one['measured']:.0f} ms", flush=True)
    print(
        f"{name}: at most {100 * result['largest']:.1f} % off (asked {100 * MOST_ERROR:.0f}), nine of ten within "
        f"{100 * result['nine_of_ten']:.1f} ({100 * USUAL_ERROR:.0f}), median {100 * result['median']:.1f} "
        f"({100 * MEDIAN_ERROR:.0f}); {len(result['wrong_order'])} of {result['pairs']} pairs in the wrong order",
        flush=True,
    )
    figures = {side: [one[side] for one in plans.values()] for side in ("predicted", "measured")}
    worst = {
        side: max((done for key, done in found["checks"].items() if key.startswith(side)), key=lambda d: d["error"])
        for side in figures
    }
    report.add(name, figures, checks=worst, notes={**result, **found})


def scatter(report: Report, path: Path) -> None:
    """Draws measured over predicted steps, a point a plan."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    largest = 0.0
    for case in report.cases:
        predicted, measured = (case.figures[side].values for side in ("predicted", "measured"))
        axes.plot(predicted, measured, "o", markersize=4, alpha=0.7, label=case.name)
        largest = max(largest, *predicted, *measured)
    line = [0.0, 1.05 * largest]
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(line, [v / (1 - USUAL_ERROR) for v in line], [v / (1 + USUAL_ERROR) for v in line], alpha=0.15)
    axes.set(xlabel="ms a step, predicted", ylabel="ms a step, measured; band: 7 %", xlim=line, ylim=line)
    axes.legend()
    figure.suptitle(title(report), fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures, and writes ``pipeline_prediction.json`` and ``.png``."""
    args = arguments()
    report = Report(
        "pipeline_prediction",
        script=cli.script_line(),
        unit="ms a step",
        reference="predicted",
        higher_is_better=False,
        conditions={
            "layers": LAYERS,
            "stages": STAGES,
            "microbatches": MICROBATCHES,
            "layer_ms": args.layer_ms,
            "steps": args.steps,
            "links": LINKS,
        },
    )
    for name in cli.names(args.links):
        measure(args, report, name)
    report.write(args.results, picture=scatter)


if __name__ == "__main__":
    main()
