"""Do decentralized backends learn as well as plain DDP? Test accuracy on digits at equal samples, several seeds.

examples/train_digits.py with the same model, settings and number of samples. A way to train is "within the spread" when
its mean test accuracy is no further from DDP's than the larger of the two standard deviations over the seeds. Beside it
stands how far apart the replicas are at the end of each epoch, when they are averaged for the evaluation only: the
consensus distance ||x - mean|| / ||mean||. It is bounded when no later epoch's median over the seeds is above the
largest one of the first quarter.

    python benchmarks/decentralized/digits_accuracy.py  # all; 15 seconds a seed and way
    python benchmarks/decentralized/digits_accuracy.py --only dssync
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.report.results import RESULTS_FOLDER
from lab.run.machine import describe_machine
from lab.workloads.digits import Variant, equal_samples, spread

WAYS = [
    Variant("gloo"),
    Variant("prague"),
    Variant("prague", ("order=atc",)),
    Variant("dssync"),
    Variant("dssync", ("order=atc",)),
    Variant("dssync", ("schedule=random",)),
    Variant("dssync", ("schedule=topology", "racks=[0,0,1,1]")),
    Variant("hop"),
    Variant("hop", ("backup_workers=1", "max_iteration_gap=4")),
    Variant("hop", ("staleness=5", "max_iteration_gap=8")),
]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few epochs: that it runs, not what it says")
    parser.add_argument("--only", default="", help="backends beside gloo, separated by commas; default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds a run may take")
    parser.add_argument("--results", type=Path, default=RESULTS_FOLDER)
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.seeds, parsed.epochs = 1, 3
    return parsed


def median_distances(of_seeds: list[list[float | None]]) -> list[float]:
    """Returns the median over the seeds for each epoch; empty where all workers hold one model."""
    medians = []
    for epoch in zip(*of_seeds, strict=True):
        values = [value for value in epoch if value is not None]
        if values:
            medians.append(statistics.median(values))
    return medians


def summary(accuracies: dict[str, list[float]], distances: dict[str, list[list[float | None]]]) -> dict[str, Any]:
    """Returns each way's spread, whether it is within DDP's, and whether its replicas stay together."""
    spreads = {name: spread(values) for name, values in accuracies.items()}
    ddp = spreads["gloo"]
    result: dict[str, Any] = {}
    for name, of_way in spreads.items():
        allowed = max(ddp["standard_deviation"], of_way["standard_deviation"])
        result[name] = {**of_way, "within_the_spread": abs(of_way["mean"] - ddp["mean"]) <= allowed}
        medians = median_distances(distances[name])
        if medians:
            early = medians[: max(1, len(medians) // 4)]
            result[name]["largest_consensus_distance"] = max(medians)
            result[name]["last_consensus_distance"] = medians[-1]
            result[name]["bounded"] = max(medians) <= max(early)
    return result


def draw(accuracies: dict[str, list[float]], distances: dict[str, list[list[float | None]]], path: Path) -> None:
    """Draws a dot a seed and a line at the mean; beside it the consensus distance by epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (14, 0.45 * len(accuracies) + 1.5)
    figure, (axes, apart) = pyplot.subplots(1, 2, figsize=size, width_ratios=(3, 4), layout="constrained")
    for row, values in enumerate(accuracies.values()):
        colour = "tab:grey" if row == 0 else "tab:blue"
        axes.plot(values, [row] * len(values), "o", alpha=0.6, color=colour)
        axes.plot(sum(values) / len(values), row, "|", markersize=24, color=colour)
    axes.set_yticks(range(len(accuracies)), list(accuracies))
    axes.invert_yaxis()
    axes.set(xlabel="test accuracy at equal samples, one dot a seed")
    for name, of_seeds in distances.items():
        medians = median_distances(of_seeds)
        if medians:
            apart.plot(range(1, len(medians) + 1), medians, "--" if "atc" in name else "-", label=name)
    apart.set(xlabel="epoch", ylabel="consensus distance, median of the seeds", yscale="log")
    apart.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Trains all ways and writes ``digits_accuracy.json`` and ``.png``."""
    args = arguments()
    chosen = {"gloo", *filter(None, args.only.split(","))} if args.only else {way.backend for way in WAYS}
    ways = [way for way in WAYS if way.backend in chosen]
    settings = {"seeds": args.seeds, "workers": args.workers, "epochs": args.epochs}
    machine = describe_machine()
    result = equal_samples(ways, **settings, deadline_s=args.deadline)
    answers = summary(result["accuracies"], result["consensus_distances"])
    for name, answer in answers.items():
        comparison = "within" if answer["within_the_spread"] else "OUTSIDE"
        apart = f"apart {answer['last_consensus_distance']:.1e}" if "bounded" in answer else ""
        apart += ", GROWING" if not answer.get("bounded", True) else ""
        print(
            f"{name:<44} {answer['mean']:.2%} +- {answer['standard_deviation']:.2%}  {comparison:<8}{apart}", flush=True
        )
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / "digits_accuracy.json"
    content = {
        "script": "benchmarks/decentralized/digits_accuracy.py",
        "machine": machine,
        **result,
        "summary": answers,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    draw(result["accuracies"], result["consensus_distances"], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
