"""What is saved on a slow network? Iterations a second of DDP over gloo and over prague, four hosts at 1 Gb/s.

Four hosts are network namespaces behind a switch, each link limited both ways (netlab.py); one worker a host with
40 MB of parameters and emulated compute (100 ms forward, 200 ms backward). A ring all-reduce of four sends and receives
1.5 times the parameters on every link, 480 ms at 1 Gb/s; an average in groups of two sends them once, 320 ms.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/prague/prague_network.py --contenders ddp,prague:smart/atc,prague:smart/cta
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.report.results import Report
from lab.run import cli
from lab.run.launch import launch
from lab.workloads.training import gradients_per_second, summarize

WORKLOAD = {"layers": 20, "parameter_bytes": 40_000_000, "forward_ms": 100.0, "backward_ms": 200.0}
TARGET = 1.8


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders="ddp,prague:smart/atc,prague:smart/cta", repeats=5)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--window", type=float, default=15.0, help="seconds that are counted, each repeat")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before them")
    parser.add_argument("--group-size", type=int, default=2, help="of prague")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.window, parsed.warmup = 1, 5.0, 1.0
    return parsed


def main() -> None:
    """Builds the network, trains, and writes ``prague_network.json`` and ``.png``."""
    args = arguments()
    contenders = cli.names(args.contenders)
    settings: dict[str, Any] = {
        "contenders": contenders,
        "options": {"group_size": args.group_size},
        "workload": WORKLOAD,
        "stragglers": "none",
        "seed": 0,
        "repeats": args.repeats,
        "warmup_s": args.warmup,
        "window_s": args.window,
    }
    with NetLab(args.hosts, rate=args.rate) as lab:
        network = lab.describe()
        if lab.emulated and args.hosts > 1:
            network["measured_gbit_s"] = [lab.measure_rate(0, host) / 1e9 for host in range(1, args.hosts)]
        print(f"network: {network}", flush=True)
        report = Report(
            "prague_network",
            script=cli.script_line(),
            unit="iterations/s",
            reference="ddp",
            conditions={**settings, **network},
        )
        results = launch(
            "lab.workloads.training:ranks",
            ranks=args.hosts,
            settings=settings,
            deadline_s=120 + args.repeats * len(contenders) * (args.warmup + args.window + 30),
            lab=lab,
        )
    gradients = gradients_per_second(results, args.window)
    report.add(
        f"{args.hosts} hosts, {args.rate}",
        {name: [value / args.hosts for value in values] for name, values in gradients.items()},
        checks=results[0]["checks"],
        target=TARGET,
        notes=summarize(results),
    )
    report.write(args.results)


if __name__ == "__main__":
    main()
