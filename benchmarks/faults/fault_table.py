"""What do the survivors of a fault see, and after how long: torch's gloo beside the backends of torchext?

Two, four and eight ranks on one machine make a fault each (``lab/faults/faults.py``), with a group timeout of 12 s and
heartbeats at their default of 5 s. Rank 1 is at fault. Times are seconds from the fault, of the first and the last
survivor. There is nothing to compare as a ratio: the results are a table, ``fault_table.md``, and ``fault_table.json``
with survivors' own words. Where a rank's log has said before whom it waits for, the table has that, too. torchrun's
restarts are in ``restart.json``.

The processes are those of the tests (tests/distributed/harness.py): survivors stay alive, because one that exits closes
its connections, and would tell the others what the backend must tell them.

Needs root, for hosts that are network namespaces.

    python benchmarks/faults/fault_table.py
    python benchmarks/faults/fault_table.py --faults slow --update  # some rows anew, into what is there
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.run import cli
from lab.run.machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "distributed"))

from harness import Outcome, Rank, Ranks, launch
from lab.faults.fault_acts import TIMEOUT_S
from lab.faults.faults import FAULTS, OURS

import torchext

LIMIT_S = 4 * TIMEOUT_S


def body(rank: Rank, backend: str, name: str, setting: Any) -> dict[str, Any]:
    """Rank function: what this rank saw, and when."""
    fault = FAULTS[name]
    log = rank.folder / f"log of {rank.rank}"
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    if fault.join is not None:
        fault.join(rank, backend, fault.options, setting)
    rank.report("ready")
    rank.pause()
    begin, end = time.monotonic() + fault.begin_s, None
    try:
        saw, kind = fault.act(rank, backend, fault.options, setting), ""
        if isinstance(saw, tuple):
            saw, end = saw
    except Exception as error:  # what it is, is the question
        saw, kind = str(error), type(error).__name__
    end = end or time.monotonic()
    suspected = re.search(r"has not called .+ called it ([0-9.]+) s ago, and waits on", log.read_text())
    suspected_s = float(suspected[1]) if suspected else None
    return {"kind": kind, "saw": saw, "begin": begin, "end": end, "suspected_s": suspected_s}


def _ending(ranks: Ranks, outcome: Outcome) -> dict[str, Any]:
    """Of a rank that did not come to the end of its body."""
    if outcome.error != "ProcessEnded":
        raise RuntimeError(f"rank {outcome.rank}: {outcome.trace}")
    process = ranks.processes[outcome.rank]
    process.join(5)
    code = process.exitcode or 0
    kind = signal.Signals(-code).name if code < 0 else f"exit {code}"
    return {"rank": outcome.rank, "kind": kind, "saw": "the process ended", "seconds": None}


def _run(backend: str, name: str, world: int) -> dict[str, Any]:
    fault = FAULTS[name]
    with fault.stage(world) as stage, launch(body, world, backend, name, stage.setting) as ranks:
        ranks.expect("ready")
        ranks.proceed()
        begin = None
        if stage.strike is not None:
            time.sleep(0.5)
            begin = time.monotonic()
            stage.strike(ranks)
        survivors = [rank for rank in range(world) if rank not in fault.absent]
        seen = []
        ranks.wait_until(lambda _, done: all(rank in done for rank in survivors), deadline=LIMIT_S)
        for rank in survivors:
            try:
                (outcome,) = ranks.outcomes([rank], deadline=0.1)
            except AssertionError:
                text = f"still waits after {LIMIT_S:g} s"
                seen.append({"rank": rank, "kind": text, "saw": text, "seconds": None})
                continue
            if outcome.error:
                seen.append(_ending(ranks, outcome))
                continue
            value = outcome.value
            seconds = round(value["end"] - (begin or value["begin"]), 3)
            seen.append({"rank": outcome.rank, "kind": value["kind"], "saw": value["saw"], "seconds": seconds})
            if value["suspected_s"] is not None:
                seen[-1]["suspected_s"] = value["suspected_s"]
    return {"backend": backend, "fault": name, "world_size": world, "seen": seen}


def _named(row: dict[str, Any]) -> str:
    """Whom or what the errors name that the fault is about."""
    texts = [saw["saw"] for saw in row["seen"] if saw["kind"] and saw["seconds"] is not None]
    if not texts:
        return ""
    about = re.compile(FAULTS[row["fault"]].named)
    found = [match.group(0) for text in texts if (match := about.search(text))]
    return f"{len(found)} of {len(texts)} say: {' / '.join(sorted(set(found)))}" if found else "nobody"


def _summary(row: dict[str, Any]) -> str:
    kinds: dict[str, list[float | None]] = {}
    for saw in row["seen"]:
        kinds.setdefault(saw["kind"] or saw["saw"], []).append(saw["seconds"])
    parts = []
    for kind, seconds in kinds.items():
        known = [value for value in seconds if value is not None]
        when = f", {min(known):.2f} to {max(known):.2f} s" if known else ""
        parts.append(f"{len(seconds)} {kind}{when}")
    suspected = [saw["suspected_s"] for saw in row["seen"] if "suspected_s" in saw]
    if suspected:
        parts.append(f"suspected in the log of {len(suspected)} after {min(suspected):.1f} to {max(suspected):.1f} s")
    return "; ".join(parts)


def _line(row: dict[str, Any]) -> str:
    what = FAULTS[row["fault"]].what
    return f"| {what} | {row['world_size']} | {row['backend']} | {_summary(row)} | {_named(row)} |"


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    """Of a row in the table: by fault, number of ranks and backend."""
    return list(FAULTS).index(row["fault"]), row["world_size"], ("gloo", *OURS).index(row["backend"])


def main() -> None:
    """Runs and writes ``fault_table.json`` and ``fault_table.md``."""
    parser = cli.parser(__doc__ or "", contenders=",".join(("gloo", *OURS)), repeats=1)
    parser.add_argument("--faults", default=",".join(FAULTS), help="rows of the table")
    parser.add_argument("--update", action="store_true", help="keep the other rows of the results that are there")
    args = parser.parse_args()
    torchext.register()
    contenders = cli.names(args.contenders)
    rows = {}
    if args.update:
        kept = json.loads((args.results / "fault_table.json").read_text())["rows"]
        rows = {_place(row): row for row in kept if row["fault"] in FAULTS}
    for name in ("killed", "numel") if args.quick else cli.names(args.faults):
        fault = FAULTS[name]
        for world, backend in itertools.product(fault.worlds, contenders):
            if backend in ("gloo", *fault.backends):
                row = _run(backend, name, world)
                rows[_place(row)] = row
                print(_line(row), flush=True)
    args.results.mkdir(parents=True, exist_ok=True)
    table = [rows[place] for place in sorted(rows)]
    lines = [
        f"What the survivors of a fault see: timeout {TIMEOUT_S:g} s, heartbeats 5 s."
        " `python benchmarks/faults/fault_table.py`",
        "",
        "| fault | ranks | backend | survivors, seconds after the fault | named |",
        "| --- | --- | --- | --- | --- |",
        *map(_line, table),
    ]
    result = {
        "name": "fault_table",
        "script": cli.script_line(),
        "conditions": {
            "timeout_s": TIMEOUT_S,
            "heartbeat_timeout_s": timedelta(seconds=5).total_seconds(),
            "faults": {name: fault.what for name, fault in FAULTS.items()},
        },
        "machine": describe_machine(),
        "rows": table,
    }
    (args.results / "fault_table.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.results / "fault_table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
