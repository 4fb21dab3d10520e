"""What do the survivors of a fault see, and after how long: torch's gloo beside the backends of torchext?

Two, four and eight ranks on one machine make a fault each, with a group timeout of 12 s and heartbeats at their default
of 5 s. Rank 1 is at fault. Times are seconds from the fault, of the first and the last survivor. There is nothing to
compare as a ratio: the results are a table, ``fault_table.md``, and ``fault_table.json`` with survivors' own words.

The processes are those of the tests (tests/distributed/harness.py): survivors stay alive, because one that exits closes
its connections, and would tell the others what the backend must tell them.

    python benchmarks/fault_table.py
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lab import cli
from lab.machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "distributed"))

from harness import Rank, launch

import torchext

WORLDS = "2,4,8"
VICTIM = 1
TIMEOUT_S = 12.0
OURS = ("prague", "hop", "dssync", "dear")

# name -> (what happens, the backends besides gloo and prague that are shown, too)
FAULTS = {
    "killed": ("rank 1 is killed (SIGKILL) in a loop of all_reduce", OURS),
    "stopped": ("rank 1 is stopped (SIGSTOP) in a loop of all_reduce", OURS),
    "stuck": ("rank 1 lives and does not call the next all_reduce", ()),
    "numel": ("rank 1 reduces 12 elements, the others 10", OURS),
    "dtype": ("rank 1 reduces int32, the others float32", ()),
    "reduction": ("rank 1 reduces by max, the others by sum", ()),
    "root": ("rank 1 broadcasts from rank 1, the others from rank 0", ()),
    "abort": ("rank 1 waits for an all_reduce that rank 0 does not call, and another of its threads calls abort()", ()),
    "destroy": ("all but rank 0 destroy the group with an all_reduce pending that rank 0 does not call", ()),
}


def _act(rank: Rank, fault: str) -> str:
    """What a rank does when the fault is on; returns what came out of it when nothing was raised."""
    odd = rank.rank == VICTIM
    ten = torch.ones(10)
    if fault in ("killed", "stopped"):
        while True:
            dist.all_reduce(torch.ones(100_000))
    if (fault == "stuck" and odd) or (fault in ("abort", "destroy") and rank.rank == 0):
        rank.pause()
    if fault == "numel":
        ten = torch.ones(12 if odd else 10)
        dist.all_reduce(ten)
    elif fault == "dtype":
        ten = ten.to(torch.int32) if odd else ten
        dist.all_reduce(ten)
    elif fault == "reduction":
        dist.all_reduce(ten, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif fault == "root":
        ten.fill_(rank.rank)
        dist.broadcast(ten, src=1 if odd else 0)
    elif fault == "destroy":
        work = dist.all_reduce(ten, async_op=True)
        dist.destroy_process_group()
        del work
        return "destroyed"
    else:
        dist.all_reduce(ten)
    return f"returned {ten[0].item():g}"


def body(rank: Rank, backend: str, fault: str) -> dict[str, Any]:
    """Rank function: what this rank saw, and when."""
    rank.init(backend, timeout=TIMEOUT_S)
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    dist.barrier()
    rank.report("ready")
    rank.pause()
    begin = time.monotonic()
    if fault == "abort":
        begin += 0.5
        if rank.rank == VICTIM:
            threading.Timer(0.5, dist.group.WORLD._get_backend(torch.device("cpu")).abort).start()
    try:
        saw, kind = _act(rank, fault), ""
    except Exception as error:  # what it is, is the question
        saw, kind = str(error), type(error).__name__
    return {"kind": kind, "saw": saw, "begin": begin, "end": time.monotonic()}


def _run(backend: str, fault: str, world: int) -> dict[str, Any]:
    with launch(body, world, backend, fault) as ranks:
        ranks.expect("ready")
        ranks.proceed()
        absent = {"stuck": [VICTIM], "abort": [0], "destroy": [0]}.get(fault, [])
        begin = time.monotonic()
        if fault in ("killed", "stopped"):
            time.sleep(0.5)
            begin = time.monotonic()
            ranks.kill(VICTIM, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            absent = [VICTIM]
        survivors = [rank for rank in range(world) if rank not in absent]
        seen = []
        for outcome in ranks.outcomes(survivors, deadline=3 * TIMEOUT_S):
            if outcome.error:
                seen.append({"rank": outcome.rank, "kind": "SIGABRT", "saw": "the process ended", "seconds": None})
                continue
            value = outcome.value
            start = begin if fault in ("killed", "stopped") else value["begin"]
            seconds = round(value["end"] - start, 3)
            seen.append({"rank": outcome.rank, "kind": value["kind"], "saw": value["saw"], "seconds": seconds})
        codes = [process.exitcode for process in ranks.processes]
    return {"backend": backend, "fault": fault, "world_size": world, "seen": seen, "exit_codes": codes}


def _named(row: dict[str, Any]) -> str:
    """Whom or what the errors name that the fault is about."""
    texts = [saw["saw"] for saw in row["seen"] if saw["kind"] not in ("", "SIGABRT")]
    if not texts:
        return ""
    about = re.compile(
        r"rank 1 (died|has been silent[^;]*|has not called \w+|called abort)|make different calls|shut the group down"
    )
    found = [match.group(0) for text in texts if (match := about.search(text))]
    return f"{len(found)} of {len(texts)} say: {found[0]}" if found else "nobody"


def _summary(row: dict[str, Any]) -> str:
    kinds: dict[str, list[float | None]] = {}
    for saw in row["seen"]:
        kinds.setdefault(saw["kind"] or saw["saw"], []).append(saw["seconds"])
    parts = []
    for kind, seconds in kinds.items():
        known = [value for value in seconds if value is not None]
        when = f", {min(known):.2f} to {max(known):.2f} s" if known else ""
        parts.append(f"{len(seconds)} {kind}{when}")
    return "; ".join(parts)


def main() -> None:
    """Runs and writes ``fault_table.json`` and ``fault_table.md``."""
    parser = cli.parser(__doc__ or "", contenders="gloo,prague,hop,dssync,dear", repeats=1)
    parser.add_argument("--worlds", default=WORLDS, help="numbers of ranks")
    args = parser.parse_args()
    torchext.register()
    contenders = cli.names(args.contenders)
    worlds = [int(world) for world in cli.names(args.worlds)]
    rows = []
    lines = [
        f"What the survivors of a fault see: timeout {TIMEOUT_S:g} s, heartbeats 5 s. `{cli.script_line()}`",
        "",
        "| fault | ranks | backend | survivors, seconds after the fault | named |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault, (what, also) in FAULTS.items():
        if args.quick and fault not in ("killed", "numel"):
            continue
        for world, backend in itertools.product(worlds, contenders):
            if backend in ("gloo", "prague") or backend in also:
                row = _run(backend, fault, world)
                rows.append(row)
                lines.append(f"| {what} | {world} | {backend} | {_summary(row)} | {_named(row)} |")
                print(lines[-1], flush=True)
    args.results.mkdir(parents=True, exist_ok=True)
    result = {
        "name": "fault_table",
        "script": cli.script_line(),
        "conditions": {
            "world_sizes": worlds,
            "timeout_s": TIMEOUT_S,
            "heartbeat_timeout_s": timedelta(seconds=5).total_seconds(),
            "faults": {name: what for name, (what, _) in FAULTS.items()},
        },
        "machine": describe_machine(),
        "rows": rows,
    }
    (args.results / "fault_table.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.results / "fault_table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
