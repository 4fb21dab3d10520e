"""What does it cost that the ranks' calls are checked against each other, and that heartbeats are sent?

Eight ranks of one machine, one group a setting, all in the same processes, in turn:

- ``off``: no check of calls, no heartbeats; otherwise the same backend
- ``new``: the defaults. Calls that repeat are predicted and not asked about
- ``every``: all ranks agree before every call
- ``gloo``: torch's own backend

A figure is the time of one ``all_reduce`` (in place, sum, float32), on the slowest rank, over a block of calls. Blocks
are short and the settings' order changes with every repeat, so that what disturbs the machine disturbs all of them. The
first calls of a shape, on which the ranks must agree under ``new``, are in the warm-up: "first call" has them by
themselves, each with a size never used before.

    python benchmarks/header_overhead.py
"""

from __future__ import annotations

import argparse
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lab import cli
from lab.launch import launch
from lab.rank import Rank
from lab.results import Checks, Report

WORLD = 8
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
CALLS = {"4 KiB": 100, "1 MiB": 20}
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


def _seconds(tensors: list[torch.Tensor], group: Any) -> float:
    """Returns the seconds of one call on this rank; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - begin) / len(tensors)


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
            for name in contenders:  # warm-up, and the predictions
                _seconds([zeros] * 10, groups[name])
            for _ in range(rank.settings["repeats"]):
                for name in order.sample(contenders, len(contenders)):
                    checks.require(f"{name} {label}")
                    figures[label][name].append(_seconds([zeros] * CALLS[label], groups[name]) * 1e3)
        for repeat in range(rank.settings["repeats"]):
            for name in order.sample(contenders, len(contenders)):
                figures[FIRST][name].append(_seconds([torch.zeros(1024 + repeat)], groups[name]) * 1e3)
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
    results = launch("header_overhead:ranks", ranks=WORLD, settings=settings, deadline_s=240)
    for label in [*SIZES, FIRST]:
        slowest = {
            name: [max(times) for times in zip(*(result["figures"][label][name] for result in results), strict=True)]
            for name in settings["contenders"]
        }
        done = results[0]["checks"]
        size = label.split(",")[0]
        report.add(
            label,
            slowest,
            checks={name: done[f"{name} {size}"] for name in slowest},
            target=TARGET if label == "1 MiB" else None,
        )
    report.write(args.results, log_scale=True)


if __name__ == "__main__":
    main()
