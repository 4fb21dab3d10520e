"""What does a slow uplink cost? Iterations a second of DDP over gloo and over dssync, eight hosts in two racks.

Hosts are network namespaces behind two switches (netlab.py): 1 Gb/s for each host, 200 Mb/s for what goes from rack
to rack. One worker a host with 10 MB of parameters and emulated compute (100 ms forward, 200 ms backward). An
all-reduce crosses the uplink in every iteration; dssync's topology schedule averages inside the racks most of the time,
having measured at the start who is where. A second network, without racks, shows what is left where nothing is shared.

Beside the speed: bytes that crossed the uplink an iteration, by the counters of its devices, and in each of the first
rounds of the schedule, which stay inside the racks.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/dssync/dssync_racks.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.net.uplink import SAMPLE_S, counting
from lab.report.results import Report
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.contenders import contender
from lab.workloads.stragglers import parse
from lab.workloads.training import Run, gradients_per_second, summarize

WORKLOAD = {"layers": 20, "parameter_bytes": 10_000_000, "forward_ms": 100.0, "backward_ms": 200.0}
RACKS_TARGET = 2.2
UNIFORM_TARGET = 1.1
IN_RACK_ROUNDS = 5  # before one crosses, where the uplink is 5 times slower than a host's link; or one more
QUIET_S = 0.6  # around a round whose bytes are counted: three samples


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    default = "ddp,dssync,dssync:topology/atc,dssync:topology/cta,dssync:grid/cta,prague"
    parser = cli.parser(__doc__ or "", contenders=default, repeats=3)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--uplink", default="200mbit", help="between the racks")
    parser.add_argument("--window", type=float, default=15.0, help="seconds that are counted, each repeat")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before them")
    parser.add_argument("--group-size", type=int, default=0, help="of dssync; default: its own choice")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.window, parsed.warmup = 1, 5.0, 1.0
    return parsed


def rounds(rank: Rank) -> list[tuple[float, float]]:
    """Rank function: takes step after step, quiet in between, and tells when each round began and ended."""
    settings = rank.settings
    which = contender(settings["contender"], **settings["options"])
    moments = []
    with rank.process_group(which.backend, which.pg_options()):
        run = Run(rank, which, settings["workload"], parse("none", rank.world_size, seed=0))
        for _ in range(settings["rounds"]):
            time.sleep(QUIET_S)
            begin = rank.board.barrier()
            run.step()
            run.training.settle()
            rank.board.barrier()
            time.sleep(QUIET_S)
            moments.append((begin, time.monotonic()))
        run.training.detach()
    return moments


def uplink_by_round(lab: NetLab, settings: dict[str, Any]) -> list[float]:
    """Returns the bytes on the uplink of each of the first rounds of the topology schedule."""
    own = {"contender": "dssync:topology/atc", "rounds": IN_RACK_ROUNDS, "options": settings["options"]}
    own["workload"] = {**settings["workload"], "forward_ms": 1.0, "backward_ms": 1.0}
    with counting(lab) as counter:
        moments = launch("dssync_racks:rounds", ranks=lab.hosts, settings=own, deadline_s=120, lab=lab)[0]
        time.sleep(2 * SAMPLE_S)
    return [counter.between(begin, end) for begin, end in moments]


def measure(
    report: Report, lab: NetLab, case: str, settings: dict[str, Any], target: float, look: Callable[[], dict[str, Any]]
) -> None:
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
    notes = {**summarize(results), "uplink_megabytes_an_iteration": uplink, **look()}
    report.add(
        case,
        {name: [value / lab.hosts for value in values] for name, values in gradients.items()},
        checks=results[0]["checks"],
        target=target,
        notes=notes,
    )
    if lab.racks > 1:
        for name, values in uplink.items():
            print(f"  {name:<22} {sum(values) / len(values):8.2f} MB on the uplink an iteration", flush=True)


def main() -> None:
    """Builds both networks, trains, and writes ``dssync_racks.json`` and ``.png``."""
    args = arguments()
    settings: dict[str, Any] = {
        "contenders": cli.names(args.contenders),
        "options": {"group_size": args.group_size},
        "workload": WORKLOAD,
        "stragglers": "none",
        "seed": 0,
        "repeats": args.repeats,
        "warmup_s": args.warmup,
        "window_s": args.window,
    }
    report = Report(
        "dssync_racks", script=cli.script_line(), unit="iterations/s", reference="ddp", conditions=dict(settings)
    )
    with NetLab(args.hosts, rate=args.rate, racks=2, uplink=args.uplink) as lab:
        report.conditions["network"] = lab.describe()

        def look() -> dict[str, Any]:
            by_round = uplink_by_round(lab, settings) if lab.emulated else []
            print("  uplink by round, MB: " + " ".join(f"{value / 1e6:.3f}" for value in by_round), flush=True)
            return {"uplink_megabytes_by_round": [value / 1e6 for value in by_round]}

        measure(report, lab, f"2 racks, uplink {args.uplink}", settings, RACKS_TARGET, look)
    with NetLab(args.hosts, rate=args.rate) as lab:
        measure(report, lab, f"one switch, {args.rate}", settings, UNIFORM_TARGET, dict)
    report.write(args.results)


if __name__ == "__main__":
    main()
