"""What does dear's hierarchical transport save behind a slow uplink? Eight hosts in two racks; its ring, and DDP.

Hosts are network namespaces behind two switches (netlab.py): 1 Gb/s for each host, 200 Mb/s for what goes from rack to
rack, both ways. One worker a host with 10 MB of parameters in layers that grow with depth and emulated compute (100 ms
forward, 200 ms backward). A ring of ranks in the order of racks sends 1.75 times the gradients over the uplink in each
direction and step, one of interleaved ranks 7 times; rooms send them once. So the racks are dealt in both ways.

Beside the speed: bytes that crossed the uplink a step, both ways, by the counters of its devices.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/dear/dear_racks.py
    python benchmarks/dear/dear_racks.py --orders interleaved --update  # one case anew, into the results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.net.uplink import counting
from lab.report.results import Report, paired_ratio
from lab.run import cli
from lab.run.launch import launch
from lab.workloads.training import gradients_per_second, summarize

CONTENDERS = "ddp,dear:sharded/2,dear:sharded/2/hierarchical,dear:replicated/2/hierarchical"
ORDERS = ("in order", "interleaved")
WORKLOAD = {"layers": 20, "growth": 15.0, "parameter_bytes": 10_000_000, "forward_ms": 100.0, "backward_ms": 200.0}
TARGET = 1.5  # over DDP
RING, ROOMS = "dear sharded/2", "dear sharded/2/hierarchical"


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=3)
    parser.add_argument("--orders", default=",".join(ORDERS), help=f"of ranks: some of {', '.join(ORDERS)}")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--uplink", default="200mbit", help="between the racks")
    parser.add_argument("--window", type=float, default=12.0, help="seconds that are counted, each repeat")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before them")
    parser.add_argument("--update", action="store_true", help="keep the other cases of the results that are there")
    parsed = parser.parse_args()
    unknown = set(cli.names(parsed.orders)) - set(ORDERS)
    if unknown:
        parser.error(f"--orders: {', '.join(sorted(unknown))}: not among {', '.join(ORDERS)}")
    if parsed.quick:
        parsed.repeats, parsed.window, parsed.warmup = 1, 5.0, 1.0
    return parsed


def measure(report: Report, lab: NetLab, case: str, settings: dict[str, Any]) -> None:
    """Trains every contender in the lab and adds a case to the report."""
    with counting(lab) as counter:
        results = launch(
            "lab.workloads.training:ranks",
            ranks=lab.hosts,
            settings=settings,
            deadline_s=180 + settings["repeats"] * len(settings["contenders"]) * (settings["window_s"] + 40),
            lab=lab,
        )
    uplink = {
        name: [counter.between(*run["window"]) / run["steps"] / 1e6 for run in runs]
        for name, runs in results[0]["runs"].items()
    }
    gradients = gradients_per_second(results, settings["window_s"])
    figures = {name: [value / lab.hosts for value in values] for name, values in gradients.items()}
    notes: dict[str, Any] = {**summarize(results), "network": lab.describe(), "uplink_megabytes_a_step": uplink}
    if {RING, ROOMS} <= figures.keys():
        ratio = paired_ratio(figures[ROOMS], figures[RING])
        notes["hierarchical over ring"] = ratio.as_json()
        print(f"{case}: hierarchical over ring x {ratio}", flush=True)
    report.add(case, figures, checks=results[0]["checks"], target=TARGET, notes=notes)
    for name, values in uplink.items():
        print(f"  {name:<30} {sum(values) / len(values):8.2f} MB on the uplink a step", flush=True)


def main() -> None:
    """Builds both networks, trains, and writes ``dear_racks.json`` and ``.png``."""
    args = arguments()
    settings: dict[str, Any] = {
        "contenders": cli.names(args.contenders),
        "options": {"allreduce_fallback": False},
        "workload": WORKLOAD,
        "stragglers": "none",
        "seed": 0,
        "repeats": args.repeats,
        "warmup_s": args.warmup,
        "window_s": args.window,
    }
    report = Report("dear_racks", script=cli.script_line(), unit="iterations/s", reference="ddp", conditions=settings)
    for order in cli.names(args.orders):
        with NetLab(args.hosts, rate=args.rate, racks=2, interleaved=order == "interleaved", uplink=args.uplink) as lab:
            measure(report, lab, f"2 racks, uplink {args.uplink}, ranks {order}", settings)
    if args.update:
        report.keep(args.results / f"{report.name}.json")
    report.write(args.results)


if __name__ == "__main__":
    main()
