"""Does dear's tuner find the best bucket size on real links? Against a grid of 12 sizes, and against random search.

Five settings of link rate, model size and compute, each on four hosts (lab/net/netlab.py) with the layers of
dear_network.py. In each the tuner decides first, as it does in training; then its choice and the 12 sizes of the grid,
log-spaced over the range that the tuner searches, are trained in turn, and compared by their step times. All without
falling back to all-reduce.

Step times differ by some percent from session to session, and the least of 12 noisy numbers is a lucky one. So what is
best is chosen by all repeats but one, and its time is that of the one left out; each repeat in turn.

Random search gets as many trials as the tuner took, of sizes drawn log-uniformly over the same range. It is played
many times over on what was measured, interpolated between the sizes of the grid: it sees times of all repeats but one,
with the noise that the tuner's windows had, and takes the size that looks best. Its time is that of the repeat left
out.

What is asked is judged by means of the measured times. Beside them stand medians, and the time of the tuner's choice on
the curves that random search is played on, where a disturbed window counts for both or neither: they explain, and do
not decide.

    python benchmarks/dear/dear_tuner.py        # 12 minutes; root
    python benchmarks/dear/dear_tuner.py --quick
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.report.plot import title
from lab.report.results import Checks, Report, Spread, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.contenders import Contender, contender
from lab.workloads.stragglers import parse
from lab.workloads.training import run_window

HOSTS = 4
GRID_SIZES = 12
# Rate of the links, megabytes of parameters, milliseconds of forward; backward takes twice as long.
SETTINGS = [("100mbit", 1, 30.0), ("300mbit", 4, 30.0), ("1gbit", 4, 15.0), ("1gbit", 10, 30.0), ("3gbit", 20, 20.0)]
TARGET = 0.97
RANDOM_SEARCHES = 2000
LEAST_MB, MOST_MB, LEAST_RANGE = 1.0, 256.0, 32.0  # the tuner's range: core::BayesianTunerOptions::forModel
MEBIBYTE = 1 << 20


def grid(megabytes: float) -> list[float]:
    """Returns the bucket sizes in MiB, ascending, from one end of the tuner's range to the other."""
    most = min(MOST_MB, megabytes * 1e6 / MEBIBYTE)
    least = min(LEAST_MB, most / LEAST_RANGE)
    return [least * (most / least) ** (place / (GRID_SIZES - 1)) for place in range(GRID_SIZES)]


def sized(mebibytes: float) -> Contender:
    """Returns dear with that bucket size."""
    return contender(f"dear:sharded/{mebibytes:.6g}", allreduce_fallback=False)


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function of one setting. ``rank.settings``: ``workload``, ``sizes``, ``repeats`` and three spans."""
    settings = rank.settings
    checks = Checks()
    measure = functools.partial(
        run_window,
        rank,
        workload=settings["workload"],
        stragglers=parse("none", rank.world_size),
        checks=checks,
        warmup_s=settings["warmup_s"],
    )
    auto = contender("dear:sharded/auto", allreduce_fallback=False)
    tuned = measure(auto, window_s=settings["window_s"], tuning_s=settings["tuning_s"])
    tried = [sized(size) for size in [*settings["sizes"], tuned["stats"]["bucket_mb"]]]
    measures = {
        str(place): functools.partial(measure, which, window_s=settings["window_s"])
        for place, which in enumerate(tried)
    }
    runs = in_turn(measures, settings["repeats"])
    steps = {name: [run["step_ms"] for run in of_size] for name, of_size in runs.items()}
    return {
        "tuned": tuned["stats_before"],
        "step_ms": steps,
        "checks": {which.name: checks.done[which.name] for which in tried},
    }


def interpolated(sizes: Sequence[float], times: Sequence[float], size: float) -> float:
    """Returns the step time of a size between those of the grid, linear in its logarithm."""
    for place in range(1, len(sizes)):
        if size <= sizes[place] or place == len(sizes) - 1:
            part = math.log(size / sizes[place - 1]) / math.log(sizes[place] / sizes[place - 1])
            return times[place - 1] + part * (times[place] - times[place - 1])
    raise ValueError("dear_tuner: a grid of one size")


def left_out(of_grid: Sequence[Sequence[float]]) -> list[tuple[list[float], list[float]]]:
    """Returns, for each repeat, the times by size that the other repeats say, and those of this one."""
    splits = []
    for repeat in range(len(of_grid[0])):
        others = [[time for other, time in enumerate(times) if other != repeat] or list(times) for times in of_grid]
        splits.append(([statistics.median(times) for times in others], [times[repeat] for times in of_grid]))
    return splits


def best_of_grid(of_grid: Sequence[Sequence[float]]) -> list[float]:
    """Returns, for each repeat, the step time of the size that the other repeats find best."""
    return [tested[seen.index(min(seen))] for seen, tested in left_out(of_grid)]


def on_curves(sizes: Sequence[float], of_grid: Sequence[Sequence[float]], size: float) -> float:
    """Returns the mean step time of one size, on each repeat's interpolated curve."""
    return statistics.mean(interpolated(sizes, tested, size) for _, tested in left_out(of_grid))


def random_search(sizes: Sequence[float], of_grid: Sequence[Sequence[float]], *, trials: int, noise: float) -> float:
    """Returns the mean step time of the sizes that random searches end with.

    Args:
        sizes: Of the grid.
        of_grid: Step times by size and repeat.
        trials: Of each search.
        noise: Standard deviation of a trial, relative.
    """
    draw = random.Random(0)
    ends = []
    for curve, tested in left_out(of_grid):
        for _ in range(RANDOM_SEARCHES):
            drawn = [sizes[0] * (sizes[-1] / sizes[0]) ** draw.random() for _ in range(trials)]
            seen = [interpolated(sizes, curve, size) * math.exp(draw.gauss(0.0, noise)) for size in drawn]
            ends.append(interpolated(sizes, tested, drawn[seen.index(min(seen))]))
    return statistics.mean(ends)


def comparison(report: Report) -> dict[str, Any]:
    """Returns what is asked: how far above the grid's best the tuner and random search end, in the mean of repeats."""
    tuner, medians, on_its_curves, searched = [], [], [], []
    for case in report.cases:
        best = statistics.mean(case.figures["best of the grid"].values)
        tuner.append(statistics.mean(case.figures["tuner"].values) / best)
        medians.append(case.figures["tuner"].median / case.figures["best of the grid"].median)
        on_its_curves.append(case.notes["tuner"]["curve_step_ms"] / best)
        searched.append(case.notes["tuner"]["random_step_ms"] / best)
    return {
        "tuner_over_best": tuner,
        "random_over_best": searched,
        "within_3_percent": max(tuner) <= 1 / TARGET,
        "most_trials": max(case.notes["tuner"]["trials"] for case in report.cases),
        "mean_of_tuner": statistics.mean(tuner),
        "mean_of_random": statistics.mean(searched),
        "median_over_best": medians,
        "mean_of_tuner_on_curves": statistics.mean(on_its_curves),
    }


def worst(checks: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the check with the largest error."""
    return max(checks.values(), key=lambda check: check["error"])


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders="dear:sharded/auto", repeats=3)
    parser.add_argument("--window", type=float, default=2.5, help="seconds that are counted, each size and repeat")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="the first so many")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.settings, parsed.window = 1, 1, 1.0
    return parsed


def picture(report: Report, path: Path) -> None:
    """Draws, by setting, the step time over the bucket size, the tuner's choice, and where random search ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(report.cases), 3.8), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(report.cases), squeeze=False)[0], report.cases, strict=True):
        found = case.notes["tuner"]
        spreads = [Spread(tuple(values)) for values in found["grid_step_ms"]]
        medians = [spread.median for spread in spreads]
        below = [spread.median - min(spread.values) for spread in spreads]
        above = [max(spread.values) - spread.median for spread in spreads]
        axes.errorbar(found["grid_mb"], medians, yerr=[below, above], fmt="o-", color="grey", label="grid of 12")
        axes.plot(found["chosen_mb"], case.figures["tuner"].median, "*", markersize=16, label="tuner's choice")
        axes.axhline(found["random_step_ms"], color="C1", linestyle="--", label="random search, mean")
        axes.set(xlabel="bucket size, MiB", title=f"{case.name}\n{found['trials']} trials")
        axes.set_xscale("log", base=2)
    figure.axes[0].set_ylabel("ms a step")
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(title(report), fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures all settings and writes ``dear_tuner.json`` and ``.png``."""
    args = arguments()
    report = Report(
        "dear_tuner",
        script=cli.script_line(),
        unit="ms a step",
        reference="best of the grid",
        higher_is_better=False,
        conditions={"hosts": HOSTS, "window_s": args.window, "random_searches": RANDOM_SEARCHES},
    )
    for rate, megabytes, forward_ms in SETTINGS[: args.settings]:
        workload = {
            "layers": 20,
            "parameter_bytes": megabytes * 1_000_000,
            "forward_ms": forward_ms,
            "backward_ms": 2 * forward_ms,
            "growth": 15.0,
        }
        sizes = grid(megabytes)
        spans = {"warmup_s": 0.3, "window_s": args.window, "tuning_s": 120.0}
        settings = {"workload": workload, "sizes": sizes, "repeats": args.repeats, **spans}
        with NetLab(HOSTS, rate=rate) as lab:
            results = launch("dear_tuner:ranks", ranks=HOSTS, settings=settings, deadline_s=900, lab=lab)
        result = results[0]
        *of_grid, chosen = list(result["step_ms"].values())
        trials = result["tuned"]["tuner"]
        noise = statistics.median(trial["noise"] for trial in trials)
        names = list(result["checks"])
        report.add(
            f"{rate}, {megabytes} MB, {3 * forward_ms:g} ms",
            {"best of the grid": best_of_grid(of_grid), "tuner": chosen},
            checks={"best of the grid": worst(result["checks"]), "tuner": result["checks"][names[-1]]},
            target=TARGET,
            notes={
                "tuner": {
                    "decided": result["tuned"]["decided"],
                    "trials": len(trials),
                    "history": trials,
                    "chosen_mb": result["tuned"]["bucket_mb"],
                    "grid_mb": sizes,
                    "grid_step_ms": of_grid,
                    "curve_step_ms": on_curves(sizes, of_grid, result["tuned"]["bucket_mb"]),
                    "random_step_ms": random_search(sizes, of_grid, trials=len(trials), noise=noise),
                    "noise": noise,
                },
            },
        )
    report.conditions["verdict"] = comparison(report)
    print(report.conditions["verdict"])
    report.write(args.results, picture=picture)


if __name__ == "__main__":
    main()
