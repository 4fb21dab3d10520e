"""What does it cost that the ranks' calls are checked against each other, and that heartbeats are sent?

Eight ranks of one machine, one group a setting, all in the same processes, in turn:

- ``off``: no check of calls, no heartbeats; otherwise the same backend
- ``new``: the defaults. Calls that repeat are predicted and not asked about
- ``every``: all ranks agree before every call
- ``gloo``: torch's own backend

A figure is the time of one ``all_reduce`` (in place, sum, float32) on rank 0, the mean over a block in which the
settings take turns call by call, in an order that changes, so that what disturbs the machine disturbs all of them. The
calls are back to back: one ends when all ranks have come to it. The first calls of a shape, on which the ranks must
agree under ``new``, are in the warm-up: "first call" has them by themselves, each with a size never used before.

    python benchmarks/faults/header_overhead.py
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.report.results import Checks, Report
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank

WORLD = 8
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
CALLS = {"4 KiB": 25, "1 MiB": 20}
FIRST = "4 KiB, first call"
TARGET = 0.99  # of the speed without checks: 1 % of the time


def _groups(contenders: list[str]) -> dict[str, Any]:
    import torchext

    groups = {}
    for name in contenders:
        if name == "gloo":
            groups[name] = dist.new_group(backend="gloo")
        else:
            heartbeat = timedelta(0) if name == "off" else timedelta(seconds=5)
            options = torchext.PragueOptions(call_check=name, heartbeat_timeout=heartbeat)
            groups[name] = dist.new_group(backend="prague", pg_options=options)
    return groups


def _block(tensors: list[torch.Tensor], groups: dict[str, Any], order: random.Random) -> dict[str, float]:
    """Returns the milliseconds of a call by setting; each tensor is reduced once in each."""
    total = dict.fromkeys(groups, 0.0)
    dist.barrier()
    begin = time.perf_counter()
    for tensor in tensors:
        for name in order.sample(sorted(groups), len(groups)):
            dist.all_reduce(tensor, group=groups[name])
            end = time.perf_counter()
            total[name] += end - begin
            begin = end
    return {name: 1e3 * seconds / len(tensors) for name, seconds in total.items()}


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: milliseconds by size, contender and repeat."""
    contenders: list[str] = rank.settings["contenders"]
    checks = Checks()
    figures: dict[str, dict[str, list[float]]] = {label: {name: [] for name in contenders} for label in SIZES}
    figures[FIRST] = {name: [] for name in contenders}
    order = random.Random(0)
    with rank.process_group("gloo"):
        groups = _groups(contenders)
        for label, nbytes in SIZES.items():
            for name in contenders:
                tensor = torch.arange(nbytes // 4, dtype=torch.float32).remainder_(997).add_(rank.rank)
                expected = (tensor - rank.rank) * WORLD + sum(range(WORLD))
                dist.all_reduce(tensor, group=groups[name])
                checks.confirm(f"{name} {label}", float((tensor - expected).abs().max()), 0.0)
            zeros = torch.zeros(nbytes // 4)  # sums stay finite
            _block([zeros] * 10, groups, order)  # warm-up, and the predictions
            for _ in range(rank.settings["repeats"]):
                for name, milliseconds in _block([zeros] * CALLS[label], groups, order).items():
                    checks.require(f"{name} {label}")
                    figures[label][name].append(milliseconds)
        for repeat in range(rank.settings["repeats"]):
            for name, milliseconds in _block([torch.zeros(1024 + repeat)], groups, order).items():
                figures[FIRST][name].append(milliseconds)
    return {"checks": checks.done, "figures": figures}


def main() -> None:
    """Runs and writes ``header_overhead.json`` and its plot."""
    parser = cli.parser(__doc__ or "", contenders="off,new,every,gloo", repeats=60)
    args: argparse.Namespace = parser.parse_args()
    if args.quick:
        args.repeats = 3
    settings = {"contenders": cli.names(args.contenders), "repeats": args.repeats}
    report = Report(
        "header_overhead",
        script=cli.script_line(),
        unit="ms",
        reference="off",
        higher_is_better=False,
        conditions={**settings, "world_size": WORLD, "network": "loopback", "calls in a block": CALLS},
    )
    results = launch("header_overhead:ranks", ranks=WORLD, settings=settings, deadline_s=480)
    for label in [*SIZES, FIRST]:
        done = results[0]["checks"]
        size = label.split(",")[0]
        report.add(
            label,
            results[0]["figures"][label],
            checks={name: done[f"{name} {size}"] for name in settings["contenders"]},
            target=TARGET if label == "1 MiB" else None,
        )
    report.write(args.results, log_scale=True)


if __name__ == "__main__":
    main()
