"""Does one slow worker slow everybody down? Gradients a second of DDP over gloo and over prague, with stragglers.

Eight workers with emulated compute (17 ms forward, 33 ms backward, asleep: see lab/workloads/emulated.py) and 4 MB of
parameters train for the same span of wall-clock time, contender after contender in one session. The figure is the
number of gradients that all workers together computed, a second. An all-reduce goes at the pace of the slowest; the
ceiling of a decentralized backend with one of eight workers 5 times slower is (7 + 1/5) / (8/5) = 4.5 times that,
and a little more where an all-reduce costs time of its own.

    python benchmarks/prague/prague_straggler.py --contenders ddp,prague:smart/atc,prague:smart/cta
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.report.results import Report
from lab.run import cli
from lab.run.launch import launch
from lab.workloads.training import gradients_per_second, summarize

WORKLOAD = {"layers": 4, "parameter_bytes": 4_000_000, "forward_ms": 17.0, "backward_ms": 33.0}
TARGETS = {"none": 1.3, "one:5": 4.2}


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders="ddp,prague:smart/atc,prague:smart/cta", repeats=5)
    parser.add_argument(
        "--patterns", default="none,one:5,one:2,random:6", help="none, one:K, random:K (lab/workloads/stragglers.py)"
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--window", type=float, default=8.0, help="seconds that are counted, each repeat")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds before them")
    parser.add_argument("--group-size", type=int, help="of prague; default: its own choice")
    parser.add_argument("--slowdown-threshold", type=int, help="of prague; default: its own choice")
    parser.add_argument("--seed", type=int, default=1, help="of the random pattern")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.window, parsed.warmup = 1, 2.0, 0.5
    return parsed


def main() -> None:
    """Runs every pattern and writes ``prague_straggler.json`` and ``.png``."""
    args = arguments()
    contenders = cli.names(args.contenders)
    options = {"group_size": args.group_size, "slowdown_threshold": args.slowdown_threshold}
    settings: dict[str, Any] = {
        "contenders": contenders,
        "options": {name: value for name, value in options.items() if value is not None},
        "workload": WORKLOAD,
        "seed": args.seed,
        "repeats": args.repeats,
        "warmup_s": args.warmup,
        "window_s": args.window,
    }
    report = Report(
        "prague_straggler",
        script=cli.script_line(),
        unit="gradients/s",
        reference="ddp",
        conditions={**settings, "ranks": args.ranks, "network": "loopback"},
    )
    session_s = args.warmup + args.window + 20
    for pattern in cli.names(args.patterns):
        results = launch(
            "lab.workloads.training:ranks",
            ranks=args.ranks,
            settings={**settings, "stragglers": pattern},
            deadline_s=120 + args.repeats * len(contenders) * session_s,
        )
        report.add(
            pattern,
            gradients_per_second(results, args.window),
            checks=results[0]["checks"],
            target=TARGETS.get(pattern),
            notes=summarize(results),
        )
    report.write(args.results)


if __name__ == "__main__":
    main()
