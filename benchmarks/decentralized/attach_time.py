"""What does it cost to measure racks? Seconds in ``torchext.attach``, with schedules that need racks and that do not.

Hosts are network namespaces behind two switches (netlab.py): 1 Gb/s for each host, 200 Mb/s for what goes from rack to
rack. By default `dssync` and `prague` measure the links between hosts when a model is attached; `dssync:grid` and
`prague:random` have no use for racks. A model of 4 KB is attached, so nothing else takes long. The seconds are those of
the rank that is held up longest; each repeat is a session of its own, and the contenders take turns.

Checked first: after a few steps all replicas have the mean that they should have.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, as one host, where nothing is
measured.

    python benchmarks/decentralized/attach_time.py
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.contenders import Contender, contender
from lab.workloads.stragglers import parse
from lab.workloads.training import Run

CONTENDERS = "dssync:grid,dssync,prague:random,prague"
WORKLOAD = {"layers": 4, "parameter_bytes": 4_000, "forward_ms": 1.0, "backward_ms": 1.0}
CHECK_STEPS = 4
TOLERANCE = 1e-4


class TimedRun(Run):
    """Times what attaching takes."""

    def attach(self) -> None:
        """Attaches when all ranks are here."""
        self.rank.board.barrier()
        begin = time.perf_counter()
        super().attach()
        self.seconds = time.perf_counter() - begin


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: every contender in turn, each repeat in a session of its own."""
    checks = Checks()

    def measure(which: Contender, steps: int = 0) -> float:
        with rank.process_group(which.backend, which.pg_options()):
            run = TimedRun(rank, which, WORKLOAD, parse("none", rank.world_size, seed=0))
            for _ in range(steps):
                run.step()
            if steps:
                checks.confirm(which.name, run.check(), TOLERANCE)
            run.training.detach()
            return run.seconds

    every = [contender(text) for text in rank.settings["contenders"]]
    for which in every:  # whatever is used for the first time in a process is not timed
        measure(which, CHECK_STEPS)
        checks.require(which.name)
    seconds = in_turn({which.name: functools.partial(measure, which) for which in every}, rank.settings["repeats"])
    return {"seconds": seconds, "checks": checks.done}


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=5)
    parser.add_argument("--hosts", default="4,8", help="one worker each; default: 4,8")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--uplink", default="200mbit", help="between the racks")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.hosts = 1, "4"
    return parsed


def main() -> None:
    """Attaches in each network and writes ``attach_time.json`` and ``.png``."""
    args = arguments()
    settings = {"contenders": cli.names(args.contenders), "repeats": args.repeats}
    report = Report(
        "attach_time",
        script=cli.script_line(),
        unit="s",
        reference=contender(settings["contenders"][0]).name,
        higher_is_better=False,
        conditions={**settings, "rate": args.rate, "uplink": args.uplink, "workload": WORKLOAD},
    )
    for hosts in map(int, cli.names(args.hosts)):
        with NetLab(hosts, rate=args.rate, racks=2, uplink=args.uplink) as lab:
            results = launch("attach_time:ranks", ranks=hosts, settings=settings, deadline_s=300, lab=lab)
            longest = {
                name: [max(values) for values in zip(*(result["seconds"][name] for result in results), strict=True)]
                for name in results[0]["seconds"]
            }
            report.add(f"{hosts} hosts in 2 racks", longest, checks=results[0]["checks"], notes=lab.describe())
    report.write(args.results)


if __name__ == "__main__":
    main()
