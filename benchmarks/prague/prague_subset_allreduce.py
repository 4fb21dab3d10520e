"""Is averaging over a few ranks of a larger world as fast as Gloo's all_reduce in a group made for them?

Eight ranks; g of them average tensors of several sizes, the others sleep. Gloo gets a dedicated group
(``dist.new_group``), prague takes the members as data of the call; all live in the same processes and take turns.
Prague's call also divides by g, Gloo's only adds. On one host prague's bytes go through memory that the ranks share;
"prague:sockets" has that turned off and takes the way that leads to other hosts.

A second table has what the first use of a set of members costs: making the group and reducing once, against the first
call with those members; then the second use of each. A call after a pause is slower than one right after another,
whoever the members are: "known members" were used many times before and get the same pause.

    python benchmarks/prague/prague_subset_allreduce.py --contenders gloo,prague,prague:sockets
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank

WORLD = 8
GROUPS = (2, 4)
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "25 MiB": 25 << 20}
CALLS = {"64 KiB": 200, "1 MiB": 50, "25 MiB": 8}
FIRST_USE_BYTES = 64 << 10
TARGET = 0.95
KNOWN = "prague, known members"
SOCKETS = "prague:sockets"
TOLERANCE = 1e-6

Reduce = Callable[[torch.Tensor], Any]


def _partial(backend: Any, members: Sequence[int]) -> Reduce:
    return lambda tensor: backend.partial_all_reduce(tensor, list(members)).wait()


def _all_reduce(group: Any) -> Reduce:
    return lambda tensor: dist.all_reduce(tensor, group=group)


def _sample(numel: int, rank: int) -> torch.Tensor:
    """A tensor that differs between ranks and between places: a block gone to the wrong place shows."""
    return torch.arange(numel, dtype=torch.float32).remainder_(997).add_(100 * rank)


def _error(reduce: Reduce, numel: int, rank: int, members: Sequence[int], *, sums: bool) -> float:
    """Reduces a sample once and returns the largest relative error over its elements."""
    tensor = _sample(numel, rank)
    reduce(tensor)
    expected = sum((_sample(numel, member) for member in members), torch.zeros(numel))
    expected /= 1 if sums else len(members)
    return float(((tensor - expected).abs() / expected.abs().clamp(min=1)).max())


def _seconds(rank: Rank, group: Any, work: Callable[[], None]) -> float:
    """Returns how long ``work`` took on the slowest member, which all start together."""
    dist.barrier(group)
    begin = time.perf_counter()
    work()
    slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.item()


def _end(group: Any) -> None:
    """Ends a group of Gloo's: each has a thread that wakes a hundred times a second, beside what is timed next."""
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


def _time_sizes(rank: Rank, size: int, backends: dict[str, Any], checks: Checks) -> dict[str, dict[str, list[float]]]:
    """Returns milliseconds a call, by tensor size and contender, in a group of ``size`` spread over the world."""
    members = list(range(0, rank.world_size, rank.world_size // size))
    group = dist.new_group(members, backend="gloo")
    figures = {}
    if rank.rank in members:
        reducers = {"gloo": _all_reduce(group)}
        reducers |= {name: _partial(backend, members) for name, backend in backends.items()}
        for label, nbytes in SIZES.items():
            for name, reduce in reducers.items():
                error = _error(reduce, nbytes // 4, rank.rank, members, sums=name == "gloo")
                checks.confirm(f"{name} g={size} {label}", error, TOLERANCE)
            zeros = torch.zeros(nbytes // 4)  # repeated sums stay finite
            calls = max(3, CALLS[label] // rank.settings["shorten"])

            def measure(name: str, label: str = label, zeros: torch.Tensor = zeros, calls: int = calls) -> float:
                checks.require(f"{name} g={size} {label}")
                reduce = reducers[name]

                def work() -> None:
                    for _ in range(calls):
                        reduce(zeros)

                return _seconds(rank, group, work) / calls * 1e3

            turns = {name: (lambda name=name: measure(name)) for name in reducers}
            in_turn(turns, 1)  # warm-up
            figures[label] = in_turn(turns, rank.settings["repeats"])
    rank.board.barrier(deadline_s=600, poll_s=0.2)
    _end(group)
    return figures


def _time_first_use(rank: Rank, size: int, backend: Any, checks: Checks) -> dict[str, dict[str, list[float]]]:
    """Returns milliseconds of the first and the second use, by contender, each repeat with members not met before."""
    sets = list(itertools.combinations(range(rank.world_size), size))
    random.Random(size).shuffle(sets)
    figures: dict[str, dict[str, list[float]]] = {"first": {}, "second": {}}
    numel = FIRST_USE_BYTES // 4

    def note(name: str, repeat: int, uses: Sequence[float], tensor: torch.Tensor) -> None:
        checks.confirm(f"{name} g={size} set {repeat}", float(tensor.abs().max()), 0.0)
        for use, seconds in zip(("first", "second"), uses, strict=True):
            figures[use].setdefault(name, []).append(seconds * 1e3)

    def two_uses(reduce: Reduce | None, begin: float) -> list[float]:
        """Returns seconds from ``begin`` to the end of the first use, and those of a second; None: not a member."""
        uses = []
        for _ in range(2):
            if reduce is not None:
                reduce(tensor)
            uses.append(time.monotonic() - begin if reduce is not None else 0.0)
            begin = rank.board.start_together()
        return uses

    def prague(name: str, repeat: int, members: Sequence[int]) -> None:
        time.sleep(0.05)
        begin = rank.board.start_together()
        reduce = _partial(backend, members) if rank.rank in members else None
        note(name, repeat, two_uses(reduce, begin), tensor)

    known = sets.pop()
    if backend is not None and rank.rank in known:
        for _ in range(20):
            _partial(backend, known)(torch.zeros(numel))
    for repeat, members in enumerate(sets[: rank.settings["repeats"]]):
        inside = rank.rank in members
        tensor = torch.zeros(numel)
        if backend is not None:
            turns = [("prague", members), (KNOWN, known)]
            for name, used in turns if repeat % 2 else reversed(turns):
                prague(name, repeat, used)
        time.sleep(0.05)
        begin = rank.board.start_together()
        group = dist.new_group(list(members), backend="gloo")  # which every rank of the world has to call
        note("gloo", repeat, two_uses(_all_reduce(group) if inside else None, begin), tensor)
        if inside:
            # A first use cannot be checked before it is timed: the sample goes the same way afterwards.
            error = _error(_all_reduce(group), numel, rank.rank, members, sums=True)
            checks.confirm(f"gloo g={size}", error, TOLERANCE)
            if backend is not None:
                error = _error(_partial(backend, members), numel, rank.rank, members, sums=False)
                checks.confirm(f"prague g={size}", error, TOLERANCE)
        if rank.rank in known and backend is not None:
            error = _error(_partial(backend, known), numel, rank.rank, known, sums=False)
            checks.confirm(f"{KNOWN} g={size}", error, TOLERANCE)
        rank.board.barrier()
        _end(group)
    return figures


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: both tables, for every group size."""
    with_prague = "prague" in rank.settings["contenders"]
    with_sockets = SOCKETS in rank.settings["contenders"]
    checks = Checks()
    timed, first = {}, {}
    if with_prague or with_sockets:
        import torchext
    with rank.process_group("prague" if with_prague else "gloo"):
        backends = {}
        if with_prague:
            backends["prague"] = torchext.backend_of(dist.group.WORLD)
        sockets = None
        if with_sockets:
            sockets = dist.new_group(backend="prague", pg_options=torchext.PragueOptions(shared_memory=False))
            backends[SOCKETS] = torchext.backend_of(sockets)
        for size in GROUPS:
            timed[str(size)] = _time_sizes(rank, size, backends, checks)
        if sockets is not None:
            _end(sockets)
        for size in GROUPS:
            first[str(size)] = _time_first_use(rank, size, backends.get("prague"), checks)
    return {"checks": checks.done, "timed": timed, "first": first}


def _merge(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Returns, by contender and repeat, the slowest rank's time."""
    return {
        name: [max(part[name][repeat] for part in parts) for repeat in range(len(parts[0][name]))] for name in parts[0]
    }


def main() -> None:
    """Runs and writes ``prague_subset_allreduce.json``, ``prague_first_use.json`` and their plots."""
    parser = cli.parser(__doc__ or "", contenders=f"gloo,prague,{SOCKETS}", repeats=9)
    args: argparse.Namespace = parser.parse_args()
    if args.quick:
        args.repeats = 2
    settings = {"contenders": cli.names(args.contenders), "repeats": args.repeats, "shorten": 4 if args.quick else 1}
    common: dict[str, Any] = {"script": cli.script_line(), "unit": "ms", "reference": "gloo", "higher_is_better": False}
    conditions = {**settings, "world_size": WORLD, "network": "loopback"}

    speed = Report("prague_subset_allreduce", **common, conditions=conditions)
    first_use = Report("prague_first_use", **common, conditions={**conditions, "bytes": FIRST_USE_BYTES})
    results = launch("prague_subset_allreduce:ranks", ranks=WORLD, settings=settings, deadline_s=900)
    for size in GROUPS:
        inside = [result for result in results if result["timed"][str(size)]]
        for label in SIZES:
            done = inside[0]["checks"]
            names = inside[0]["timed"][str(size)][label]
            speed.add(
                f"g={size}, {label}",
                _merge([result["timed"][str(size)][label] for result in inside]),
                checks={name: done[f"{name} g={size} {label}"] for name in names},
                target=TARGET,
            )
        for use in ("first", "second"):
            figures = _merge([result["first"][str(size)][use] for result in results])
            checked = {
                name: next(r["checks"][f"{name} g={size}"] for r in results if f"{name} g={size}" in r["checks"])
                for name in figures
            }
            first_use.add(f"g={size}, {use} use", figures, checks=checked)
    speed.write(args.results, log_scale=True)
    first_use.write(args.results, log_scale=True)


if __name__ == "__main__":
    main()
