"""What lies under what? A picture of three steps of one rank: reduce-scatter under backward, all-gather under forward.

The network and the coarser model of dear_network.py. Rank 0 records five steps by torch.profiler, and the middle three
are drawn; their ranges are also written beside the picture, ``dear_timeline_trace.json``, for chrome://tracing or
ui.perfetto.dev (a process is a contender). dear may not fall back to an all-reduce here.

Steps under a profiler are a little longer than others: speed is dear_network.py's question.

    python benchmarks/dear/dear_timeline.py
    python benchmarks/dear/dear_timeline.py --contenders ddp,ddp:4  # without torchext
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from dear_network import MODELS
from lab.net.netlab import NetLab
from lab.report import plot, timeline
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.contenders import Contender, contender
from lab.workloads.stragglers import parse
from lab.workloads.training import Run

RECORDED = 5
WORKLOAD = MODELS["coarse"]  # its ranges can be read
FIRST, LAST = 1, 3  # of them: the ranges of the first began before the recording, those of the last end after it
CHECK_STEPS = 4
TOLERANCE = 1e-4


def record(which: Contender, rank: Rank, checks: Checks, *, warmup: int) -> dict[str, Any]:
    """Trains, records on rank 0, and returns the milliseconds of each recorded step and the trimmed trace."""
    with rank.process_group(which.backend, which.pg_options()):
        run = Run(rank, which, WORKLOAD, parse("none", rank.world_size))
        run.module.annotate()
        for _ in range(CHECK_STEPS):
            run.step()
        checks.confirm(which.name, run.check(), TOLERANCE)
        for _ in range(warmup):
            run.step()
        checks.require(which.name)
        # The backends have threads of their own, that existed before the profiler: without this it sees none of them.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config)
        ends = [time.monotonic()]
        with profiler if rank.rank == 0 else contextlib.nullcontext():
            for index in range(RECORDED):
                with torch.profiler.record_function(f"step {index}"):
                    run.step()
                ends.append(time.monotonic())
        events: list[dict[str, Any]] = []
        if rank.rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(file))
                events = timeline.trim(json.loads(file.read_text()), FIRST, LAST)
        rank.board.barrier()
        checks.confirm(f"{which.name} after", run.error(), TOLERANCE)
        stats = run.training.stats()
        run.training.detach()
    return {
        "step_ms": statistics.mean(b - a for a, b in zip(ends[FIRST:], ends[FIRST + 1 : LAST + 2], strict=False)) * 1e3,
        "events": events,
        "stats": stats,
    }


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function. ``rank.settings``: ``contenders``, ``repeats``, ``warmup``."""
    settings, checks = rank.settings, Checks()
    measures = {
        which.name: functools.partial(record, which, rank, checks, warmup=settings["warmup"])
        for which in (contender(text).without_fallback() for text in settings["contenders"])
    }
    return {"runs": in_turn(measures, settings["repeats"]), "checks": checks.done}


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders="ddp,dear:sharded/4,dear:replicated/4", repeats=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the recorded ones")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.warmup = 1
    return parsed


def main() -> None:
    """Records and writes ``dear_timeline.json``, ``.png`` and ``dear_timeline_trace.json``."""
    args = arguments()
    contenders = cli.names(args.contenders)
    settings = {"contenders": contenders, "repeats": args.repeats, "warmup": args.warmup}
    with NetLab(args.hosts, rate=args.rate) as lab:
        report = Report(
            "dear_timeline",
            script=cli.script_line(),
            unit="ms a step, under the profiler",
            reference="ddp",
            higher_is_better=False,
            conditions={**settings, "workload": WORKLOAD, **lab.describe()},
        )
        deadline_s = 120 + args.repeats * len(contenders) * (60 + 3 * args.warmup)
        results = launch("dear_timeline:ranks", ranks=args.hosts, settings=settings, deadline_s=deadline_s, lab=lab)
    runs = results[0]["runs"]
    traces = {name: ones[-1]["events"] for name, ones in runs.items()}
    overlaps = {name: timeline.overlap(events) for name, events in traces.items()}
    for name, shares in overlaps.items():
        print(f"{name}: " + ", ".join(f"{what} {value:.3g}" for what, value in shares.items()))
    report.add(
        f"{args.hosts} hosts, {args.rate}",
        {name: [one["step_ms"] for one in ones] for name, ones in runs.items()},
        checks=results[0]["checks"],
        notes={"overlap_of_three_steps": overlaps, "stats": {name: ones[-1]["stats"] for name, ones in runs.items()}},
    )

    def picture(drawn: Report, path: Path) -> None:
        timeline.draw(traces, path, title=plot.title(drawn))

    report.write(args.results, picture=picture)
    named = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}} for number, name in enumerate(traces)
    ]
    events = [{**event, "pid": number} for number, ones in enumerate(traces.values()) for event in ones]
    path = args.results / "dear_timeline_trace.json"
    path.write_text(json.dumps({"traceEvents": [*named, *events]}, separators=(",", ":")) + "\n")
    print(f"written: {path}, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
