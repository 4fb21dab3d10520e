"""Several calls in one group of processes: to start the processes is most of what a multi-process test costs.

    CASES = {"sum of float32": (body_sum, torch.float32), "sum of int64": (body_sum, torch.int64)}

    for name, values in run_in_one_group(CASES, 2).items():      # of each case the values of all ranks
        with named(name):
            assert values == [3, 3]

A case that fails is named in the failure. What follows it is not run, so that cases of one group must not break it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from harness import DEADLINE, Rank, run_ranks

Case = tuple[Any, ...]  # a function of a rank, and its further arguments


@contextlib.contextmanager
def named(name: object) -> Iterator[None]:
    """Inside, an error says of which case it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the case: {name}")
        raise


def _body(rank: Rank, cases: Mapping[str, Case], init: dict[str, Any]) -> dict[str, Any]:
    rank.init(**init)
    values = {}
    for name, (call, *args) in cases.items():
        with named(name):
            values[name] = call(rank, *args)
        gc.collect()  # groups of its own end here, and not in the next case
    dist.destroy_process_group()
    return values


def run_in_one_group(
    cases: Mapping[str, Case], size: int, *, backend: str = "gloo", deadline: float = DEADLINE, **init: Any
) -> dict[str, list[Any]]:
    """Of each case the values of all ranks; fails if one raises or the deadline passes.

    Args:
        cases: By name, in the order in which all ranks call them. The default group is there already.
        size: Of the group.
        backend: Of the group.
        deadline: For all cases together, in seconds.
        **init: Further arguments of ``Rank.init``.
    """
    found = run_ranks(_body, size, dict(cases), {"backend": backend, **init}, deadline=deadline)
    return {name: [values[name] for values in found] for name in cases}


def _bodies(rank: Rank, cases: Mapping[str, Case]) -> dict[str, Any]:
    folder, values = rank.folder, {}
    for place, (name, (call, *args)) in enumerate(cases.items()):
        rank.folder = folder / str(place)
        rank.folder.mkdir(exist_ok=True)
        with named(name):
            values[name] = call(rank, *args)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    return values


def run_in_turn(cases: Mapping[str, Case], size: int, *, deadline: float = DEADLINE) -> dict[str, list[Any]]:
    """As :func:`run_in_one_group`, where each case makes the default group by itself: the processes are the same."""
    found = run_ranks(_bodies, size, dict(cases), deadline=deadline)
    return {name: [values[name] for values in found] for name in cases}
