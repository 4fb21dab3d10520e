"""Does `torchext.auto` predict steps, and choose the fastest exact way? Four emulated hosts, by network and model.

In each network the links are calibrated once, and each model is profiled and planned for (`auto.plan`). Then every
exact candidate trains for some steps, by the buckets that it was predicted with, in turn and without dear's own
comparison: predicted beside measured milliseconds. `apply` trains as a user's script does: by the chosen way, with the
comparison that dear makes in its first 77 steps, which are not timed; what it ends with is noted.

Beside them stand ways of torch's that change what is learned, marked `inexact`: the communication hooks `bf16` and
`PowerSGD` (rank 1), and local SGD that averages every fourth step (`PostLocalSGD 4`). The layers' weights are matrices
here, because PowerSGD compresses nothing else. Their gradients have rank 1, so its approximation loses nothing.

Checked first: all replicas are where plain gradient descent takes them.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/auto/auto_choice.py                                # 1 Gb/s and 200 Mb/s, two models: 15 minutes
    python benchmarks/auto/auto_choice.py --networks none,racks,straggler --models deep,coarse,resnet50,resnet101
    python benchmarks/auto/auto_choice.py --networks 200mbit --update    # one network anew, into the results
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.report.results import Checks, Report, Spread, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads import emulated
from lab.workloads.choice_contenders import CONTENDERS, EXACT, PERIOD, REFERENCE, WARMUP_STEPS, Job, named, possible

HOSTS = 4
_COMPUTE = {"forward_ms": 100.0, "backward_ms": 200.0}
MODELS: dict[str, dict[str, Any]] = {
    "deep": {"layers": 54, "growth": 15.0, **_COMPUTE},
    "coarse": {"layers": 20, "growth": 15.0, **_COMPUTE},
    **{
        f"resnet{layers}": {"layers": layers + 4, "sizes": emulated.resnet_sizes(layers), **_COMPUTE}
        for layers in (50, 101, 152)
    },
}
# Less to send where links are slow, so that a step takes about a second everywhere.
NETWORKS: dict[str, dict[str, Any]] = {
    "1gbit": {"lab": {"rate": "1gbit"}, "megabytes": 40},
    "200mbit": {"lab": {"rate": "200mbit"}, "megabytes": 8},
    "none": {"lab": {"rate": None}, "megabytes": 40},
    "racks": {"lab": {"rate": "1gbit", "racks": 2, "uplink": "1gbit"}, "megabytes": 40},
    "straggler": {"lab": {"rate": "1gbit"}, "megabytes": 40, "slow": 1.5},
}
TARGET_ERROR = 0.10  # of one prediction
TARGET_MEDIAN_ERROR = 0.05
TARGET_OF_BEST = 1.03  # apply's step over the best candidate's
TARGET_OF_DDP = 1.02
CLEARLY = 0.03  # measured steps that differ by more must be predicted in this order


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: calibrates, then plans, checks and trains model by model."""
    settings = rank.settings
    link: Any = None
    found: dict[str, Any] = {}
    for name, workload in settings["models"].items():
        checks = Checks()
        job = Job(rank, {**settings, "workload": workload}, checks)
        with rank.process_group("gloo"):
            begun = time.perf_counter()
            link = job.make_plan(link)
            planned = time.perf_counter() - begun
        contenders: dict[str, Callable[[], list[float]]] = {
            contender: functools.partial(job.measure, contender)
            for contender in settings["contenders"]
            if contender not in EXACT or possible(job.plan, contender)
        }
        steps = in_turn(contenders, settings["repeats"])
        found[name] = {
            "checks": checks.done,
            "steps_ms": {which: [[round(ms, 2) for ms in run] for run in of] for which, of in steps.items()},
            "predicted_ms": {named(c): 1e3 * c.step_seconds for c in job.plan.candidates if c.exact and c.possible},
            "buckets": {named(c): len(c.buckets) for c in job.plan.candidates if c.exact},
            "chosen": named(job.plan.chosen),
            "decided": job.decided,
            "planned_s": planned,
            "explanation": job.plan.explain(),
            "link": {"bytes_per_second": link.bytes_per_second, "spread": link.spread, "took_s": link.elapsed_seconds},
        }
    return found


def figures_of(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns of each contender the mean step of a repeat in milliseconds, on the slowest rank."""
    return {
        name: [
            max(sum(result["steps_ms"][name][repeat]) / len(result["steps_ms"][name][repeat]) for result in results)
            for repeat in range(len(first))
        ]
        for name, first in results[0]["steps_ms"].items()
    }


def verdicts(found: Mapping[str, Any], figures: Mapping[str, list[float]]) -> dict[str, Any]:
    """Prints and returns how good predictions and choice were."""
    measured = {name: Spread(tuple(values)).median for name, values in figures.items()}
    predicted = {name: value for name, value in found["predicted_ms"].items() if name in measured}
    errors = {name: predicted[name] / measured[name] - 1 for name in predicted}
    wrong = [
        f"{one} and {other}"
        for one in predicted
        for other in predicted
        if measured[one] * (1 + CLEARLY) < measured[other] and predicted[one] > predicted[other]
    ]
    result: dict[str, Any] = {"errors": errors, "wrong_order": wrong}
    for name, value in predicted.items():
        print(
            f"  {name:<18} predicted {value:7.1f} ms, measured {measured[name]:7.1f} ms: {100 * errors[name]:+5.1f} %"
        )
    if "apply" in measured:
        best = min((name for name in EXACT if name in measured), key=lambda name: measured[name], default=None)
        if best is not None:
            result["apply_over_best"] = measured["apply"] / measured[best]
            result["best"] = best
        if REFERENCE in measured:
            result["apply_over_ddp"] = measured["apply"] / measured[REFERENCE]
        print(f"  chosen {found['chosen']}, in the end {found['decided']}; fastest measured {best}")
    if wrong:
        print(f"  predicted in the wrong order: {', '.join(wrong)}")
    return result


def summary(report: Report) -> None:
    """Prints the goals over all cases."""
    errors = [abs(error) for case in report.cases for error in case.notes["verdicts"]["errors"].values()]
    if errors:
        median = Spread(tuple(errors)).median
        print(
            f"predictions: at most {100 * max(errors):.1f} % off (goal {100 * TARGET_ERROR:g}), median "
            f"{100 * median:.1f} % (goal {100 * TARGET_MEDIAN_ERROR:g})"
        )
    for key, goal in (("apply_over_best", TARGET_OF_BEST), ("apply_over_ddp", TARGET_OF_DDP)):
        ratios = [case.notes["verdicts"][key] for case in report.cases if key in case.notes["verdicts"]]
        if ratios:
            print(f"{key}: at most {max(ratios):.3f} (goal {goal:g})")


def picture(report: Report, path: Path) -> None:
    """Draws measured over predicted steps, with a band of 10 %."""
    from lab.report.plot import title
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    largest = 0.0
    for index, name in enumerate(EXACT):
        points = [
            (case.notes["predicted_ms"][name], case.figures[name].median)
            for case in report.cases
            if name in case.figures and name in case.notes["predicted_ms"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=f"C{index}", label=name)
            largest = max(largest, *(value for point in points for value in point))
    ends = [0.0, 1.1 * largest]
    axes.plot(ends, ends, "-", color="grey", linewidth=1)
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="grey", alpha=0.15)
    axes.set(xlim=ends, ylim=ends, xlabel="predicted step (ms)", ylabel="measured step (ms); the band is 10 %")
    axes.legend()
    figure.suptitle(title(report), fontsize=7)
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=",".join(CONTENDERS), repeats=2)
    parser.add_argument("--networks", default="1gbit,200mbit", help=f"some of {', '.join(NETWORKS)}")
    parser.add_argument("--models", default="deep,resnet50", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=8, help=f"that are timed, each repeat; a multiple of {PERIOD}")
    parser.add_argument("--update", action="store_true", help="keep the other cases of the results that are there")
    parsed = parser.parse_args()
    parsed.contenders = cli.names(parsed.contenders)
    for flag, names, known in (
        ("--networks", cli.names(parsed.networks), NETWORKS),
        ("--models", cli.names(parsed.models), MODELS),
        ("--contenders", parsed.contenders, CONTENDERS),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"{flag}: {', '.join(unknown)}: not among {', '.join(known)}")
    if parsed.steps < PERIOD or parsed.steps % PERIOD:
        parser.error(f"--steps: must be a multiple of {PERIOD}, got {parsed.steps}")
    if parsed.quick:
        parsed.repeats, parsed.steps = 1, PERIOD
    return parsed


def measure(args: argparse.Namespace, network: str, report: Report) -> None:
    """Measures all models in one network, and adds a case for each."""
    given = NETWORKS[network]
    nbytes = int((1 if args.quick else given["megabytes"]) * 1e6)
    spans = {"forward_ms": 10.0, "backward_ms": 20.0} if args.quick else {}
    models = {name: {**MODELS[name], "parameter_bytes": nbytes, **spans} for name in cli.names(args.models)}
    settings = {
        "models": models,
        "contenders": args.contenders,
        "repeats": args.repeats,
        "steps": args.steps,
        "slow": given.get("slow", 1.0),
    }
    with NetLab(HOSTS, **given["lab"]) as lab:
        conditions = lab.describe()
        results = launch("auto_choice:ranks", ranks=HOSTS, settings=settings, deadline_s=2400, lab=lab)
    for name in models:
        own = [result[name] for result in results]
        figures = figures_of(own)
        print(f"{network}, {name}:\n{own[0]['explanation']}")
        notes = {key: value for key, value in own[0].items() if key not in ("checks", "explanation")}
        report.add(
            f"{name}, {network}",
            figures,
            checks=own[0]["checks"],
            notes={**notes, "network": conditions, "verdicts": verdicts(own[0], figures)},
        )


def main() -> None:
    """Measures network by network, and writes ``auto_choice.json`` and ``.png``."""
    args = arguments()
    report = Report(
        "auto_choice",
        script=cli.script_line(),
        unit="ms",
        reference=REFERENCE,
        higher_is_better=False,
        conditions={"hosts": HOSTS, "steps": args.steps, "warmup_steps": WARMUP_STEPS, "networks": NETWORKS},
    )
    for network in cli.names(args.networks):
        measure(args, network, report)
        if args.update:
            report.keep(args.results / f"{report.name}.json")
        report.write(args.results, picture=picture)  # each time: a network takes minutes
    summary(report)


if __name__ == "__main__":
    main()
