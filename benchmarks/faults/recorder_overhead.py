"""What does torch's flight recorder cost, in calls so short that it could show?

Two ranks, processes of their own for each setting, since the recorder reads its switch once:

- ``off``: ``TORCH_FR_BUFFER_SIZE=0``
- ``on``: the default

A figure is the time of one call on rank 0, the mean over ``CALLS`` back to back: ``all_reduce``, which torch records,
and ``partial_all_reduce``, which torchext does; and of one training step of a small attached model, whose average is
recorded. The settings take turns launch by launch.

    python benchmarks/faults/recorder_overhead.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.report.results import Checks, Report
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
CALLS = 1500
ELEMENTS = 1024
ROWS = ("all_reduce, 4 KiB", "partial_all_reduce, 4 KiB", "training step, 5 KiB")
SWITCH = "TORCH_FR_BUFFER_SIZE"


def _timed(call: Callable[[], object]) -> float:
    """Returns the milliseconds of a call, after a warm-up of a tenth."""
    for _ in range(CALLS // 10):
        call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e3 * (time.perf_counter() - begin) / CALLS


def _recorded() -> int:
    """Returns how many entries the recorder of the backend holds."""
    return len(json.loads(c10d._dump_fr_trace_json(backend="prague")).get("entries", []))


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: milliseconds of each row."""
    import torchext

    checks = Checks()
    with rank.process_group("prague", torchext.PragueOptions(group_size=WORLD)):
        values = torch.arange(ELEMENTS, dtype=torch.float32) + rank.rank
        summed = values.clone()
        dist.all_reduce(summed)
        partial = torchext.backend_of().partial_all_reduce
        averaged = values.clone()
        partial(averaged, [0, 1]).wait()
        expected = 2 * torch.arange(ELEMENTS, dtype=torch.float32) + 1
        error = max(float((summed - expected).abs().max()), float((averaged - expected / 2).abs().max()))
        checks.confirm(rank.settings["setting"], error, 0.0)

        zeros = torch.zeros(ELEMENTS)
        milliseconds = [
            _timed(lambda: dist.all_reduce(zeros)),
            _timed(lambda: partial(zeros, [0, 1]).wait()),
        ]
        model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = torchext.attach(model, optimizer)
        inputs = torch.ones(4, 32)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

        milliseconds.append(_timed(step))
        sync.detach()
        recorded = _recorded()
    if (recorded > 0) != (rank.settings["setting"] == "on"):
        raise RuntimeError(f"{rank.settings['setting']}: the recorder has {recorded} entries")
    return {"checks": checks.done, "milliseconds": dict(zip(ROWS, milliseconds, strict=True))}


def main() -> None:
    """Runs and writes ``recorder_overhead.json`` and its plot."""
    parser = cli.parser(__doc__ or "", contenders="off,on", repeats=8)
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    report = Report(
        "recorder_overhead",
        script=cli.script_line(),
        unit="ms",
        reference="off",
        higher_is_better=False,
        conditions={"world_size": WORLD, "network": "loopback", "calls": CALLS, "repeats": args.repeats},
    )
    settings = cli.names(args.contenders)
    figures: dict[str, dict[str, list[float]]] = {row: {name: [] for name in settings} for row in ROWS}
    checks: dict[str, dict[str, float]] = {}
    for _ in range(args.repeats):
        for name in settings:
            os.environ.pop(SWITCH, None)
            if name == "off":
                os.environ[SWITCH] = "0"
            result = launch("recorder_overhead:ranks", ranks=WORLD, settings={"setting": name}, deadline_s=120)[0]
            checks.update(result["checks"])
            for row, milliseconds in result["milliseconds"].items():
                figures[row][name].append(milliseconds)
    for row in ROWS:
        report.add(row, figures[row], checks=checks)
    report.write(args.results)


if __name__ == "__main__":
    main()
