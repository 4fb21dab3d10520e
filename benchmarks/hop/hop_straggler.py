"""How much faster do the fast workers get when Hop stops waiting for the slow ones, and how far ahead do they run?

Eight workers on the ring-based graph with emulated compute (17 ms forward, 33 ms backward, asleep: see
emulated.py) and 1 MB of parameters, which is the message to each of three neighbours, train for the same span of
wall-clock time, contender after contender in one session. Two figures:

  fastest      iterations a second of the fastest worker, over those of hop's standard mode in the same run: what the
               paper compares. Iterations that a worker jumped over count.
  gradients    all gradients a second of all workers together, over those of DDP over gloo in the same run. A worker
               that skips iterations contributes fewer: the two figures stand side by side.

What the patterns ask: random:6, each step of each worker 6 times slower with probability 1/8; one:4, one worker
always 4 times slower; none, nobody: there the standard mode's exposed communication (time the training thread waited
for models, tokens or memory) is to stay below 3 % of a step. Each contender's histogram of gaps, how many iterations a
worker was ahead of an in-neighbour, is drawn beside the bound of its mode.

    python benchmarks/hop/hop_straggler.py
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.report.results import Report
from lab.run import cli
from lab.run.launch import launch
from lab.workloads.training import fastest_per_second, gradients_per_second, summarize

WORKLOAD = {"layers": 4, "parameter_bytes": 1_000_000, "forward_ms": 17.0, "backward_ms": 33.0}
CONTENDERS = (
    "ddp,hop,hop:backup=1+max_ig=4,hop:staleness=5+max_ig=8,hop:backup=1+max_ig=5+max_jump=2,"
    "hop:backup=1+max_ig=5+max_jump=10"
)
# Of the fastest worker, over the standard mode.
TARGETS = {
    ("random:6", "hop backup=1+max_ig=4"): 1.25,
    ("random:6", "hop staleness=5+max_ig=8"): 1.40,
    ("random:6", "hop backup=1+max_ig=5+max_jump=10"): 1.40,
    ("one:4", "hop backup=1+max_ig=5+max_jump=2"): 1.9,
    ("one:4", "hop backup=1+max_ig=5+max_jump=10"): 3.6,
}
GRADIENTS_TARGET = {"random:6": 1.8}  # of the best, over DDP
EXPOSED_TARGET = 0.03


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=5)
    parser.add_argument("--patterns", default="none,random:6,one:4", help="none, one:K, random:K (stragglers.py)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--window", type=float, default=10.0, help="seconds that are counted, each repeat")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds before them")
    parser.add_argument("--seed", type=int, default=1, help="of the random pattern")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.window, parsed.warmup = 1, 2.0, 0.5
    return parsed


def gaps(results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Returns the histogram of gaps of all ranks and repeats, the largest, and the bound of the mode."""
    runs = [run for result in results for run in result["runs"][name]]
    total: Counter[int] = Counter()
    for run in runs:
        total.update({int(gap): count for gap, count in run["stats"]["gaps"].items()})  # texts, on their way as JSON
    return {
        "histogram": dict(sorted(total.items())),
        "largest": max(total, default=0),
        "bound": max(run["stats"]["gap_bound"] for run in runs),
    }


def exposed(results: list[dict[str, Any]], name: str) -> list[float]:
    """Returns the waits of training as a share of a step, the mean over the ranks, one number a repeat."""
    by_rank = [result["runs"][name] for result in results]
    shares = []
    for repeat in range(len(by_rank[0])):
        of_ranks = []
        for runs in by_rank:
            before, after = runs[repeat]["stats_before"], runs[repeat]["stats"]
            waited = (after["exposed_ms"] - before["exposed_ms"]) / (after["steps"] - before["steps"])
            of_ranks.append(waited / runs[repeat]["step_ms"])
        shares.append(sum(of_ranks) / len(of_ranks))
    return shares


def draw_gaps(by_pattern: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Draws a panel for every contender and pattern: the share of each gap, and the mode's bound as a line.

    Args:
        by_pattern: What :func:`gaps` returned, by pattern and contender.
        path: Of the PNG.
    """
    from matplotlib.figure import Figure

    names = list(next(iter(by_pattern.values())))
    figure = Figure(figsize=(3.2 * len(by_pattern), 1.4 * len(names) + 0.6), layout="constrained")
    panels = figure.subplots(len(names), len(by_pattern), sharex=True, sharey=True, squeeze=False)
    for column, (pattern, notes) in enumerate(by_pattern.items()):
        for row, name in enumerate(names):
            note, axes = notes[name], panels[row][column]
            total = sum(note["histogram"].values())
            shares = [count / total for count in note["histogram"].values()]
            axes.bar([int(gap) for gap in note["histogram"]], shares, color="tab:blue", alpha=0.7)
            axes.axvline(note["bound"] + 0.5, color="red", linestyle="dashed")
            axes.set_title(f"{pattern}, {name}: at most {note['largest']}", fontsize="xx-small")
            axes.tick_params(labelsize="x-small")
    figure.supxlabel("iterations ahead of an in-neighbour; dashed: the mode's bound", fontsize="small")
    figure.supylabel("share of iterations", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs every pattern; writes ``hop_straggler`` (fastest), ``hop_straggler_gradients`` and ``hop_gaps.png``."""
    args = arguments()
    contenders = cli.names(args.contenders)
    settings: dict[str, Any] = {
        "contenders": contenders,
        "options": {},
        "workload": WORKLOAD,
        "seed": args.seed,
        "repeats": args.repeats,
        "warmup_s": args.warmup,
        "window_s": args.window,
    }
    conditions = {**settings, "ranks": args.ranks, "graph": "ring-based", "network": "loopback"}
    shared = {"script": cli.script_line(), "conditions": conditions}
    fastest = Report("hop_straggler", unit="iterations/s of the fastest worker", reference="hop", **shared)
    gradients = Report("hop_straggler_gradients", unit="gradients/s of all workers", reference="ddp", **shared)
    drawn: dict[str, dict[str, dict[str, Any]]] = {}
    comparisons = []
    for pattern in cli.names(args.patterns):
        results = launch(
            "lab.workloads.training:ranks",
            ranks=args.ranks,
            settings={**settings, "stragglers": pattern},
            deadline_s=120 + args.repeats * len(contenders) * (args.warmup + args.window + 20),
        )
        checks = results[0]["checks"]
        names = [name for name in results[0]["runs"] if name.startswith("hop")]
        by_gap = {name: gaps(results, name) for name in names}
        shares = {name: exposed(results, name) for name in names}
        targets = {name: target for (case, name), target in TARGETS.items() if case == pattern and name in names}
        notes = {**summarize(results), "gaps": by_gap, "exposed_share_of_a_step": shares, "targets": targets}
        row = fastest.add(pattern, fastest_per_second(results, args.window), checks=checks, notes=notes)
        gradients.add(
            pattern,
            gradients_per_second(results, args.window),
            checks=checks,
            target=GRADIENTS_TARGET.get(pattern),
        )
        for name, target in targets.items():
            ratio = row.ratios[name].median
            comparisons.append(f"{pattern}: {name}: {ratio:.2f} x standard, target {target:g}: {_met(ratio >= target)}")
        if pattern == "none" and "hop" in shares:
            share = sorted(shares["hop"])[len(shares["hop"]) // 2]
            comparisons.append(f"none: exposed {share:.1%} of a step, target < 3 %: {_met(share < EXPOSED_TARGET)}")
        drawn[pattern] = by_gap
        for name, note in by_gap.items():
            if note["largest"] > note["bound"]:
                raise SystemExit(f"{pattern}: {name}: a gap of {note['largest']} above the bound {note['bound']}")
    print("\n".join(comparisons), flush=True)

    fastest.write(args.results)
    gradients.write(args.results)
    draw_gaps(drawn, args.results / "hop_gaps.png")


def _met(holds: bool) -> str:
    return "met" if holds else "MISSED"


if __name__ == "__main__":
    main()
