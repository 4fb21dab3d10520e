"""Rows of one table, one after the other in one group of processes: to start these takes longer than most rows do.

    def body(rank: Rank, backend: str) -> float: ...   # as for run_ranks(), once a row

    for name, outcomes in run_rows(body, 2, {"prague": ("prague",), "hop": ("hop",)}).items():
        assert all(outcome.value > 1 for outcome in outcomes), (name, outcomes)

Each row has a folder of its own, where its ranks meet. Its groups end behind it, when every rank has its outcome: the
threads of a group look for news a hundred times a second. A row that fails leaves the others to run; one that does not
end is named.

Rows that do different things are calls, each a function of a rank and its further arguments: values_in_turn(), and for
calls that share the default group, values_in_one_group(). It is made anew behind a call that fails.

    CALLS = {"float32": (body_sum, torch.float32), "int64": (body_sum, torch.int64)}

    for name, values in values_in_one_group(CALLS, 2).items():
        with row(name):
            assert values == [3, 3]

A rank that is killed or stopped in some row is a victim: it runs each row in a child, forked where it has no group yet.
One that is stopped goes on when all others have their outcome.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from harness import DEADLINE, PR_SET_PDEATHSIG, Outcome, Rank, launch

Rows = Mapping[str, tuple[Any, ...]]


def run_rows(
    body: Callable[..., Any],
    size: int,
    rows: Rows,
    *,
    victims: Collection[int] = (),
    keep: bool = False,
    deadline: float = DEADLINE,
) -> dict[str, list[Outcome]]:
    """The outcomes of all ranks, by row; `deadline` is that of each row. keep: its groups, for the next one."""
    assert rows
    with launch(_walk, size, body, dict(rows), set(victims), keep) as ranks:
        for name in rows:
            try:
                ranks.expect(_over(name), deadline=deadline)
            except AssertionError as error:
                error.add_note("\n".join(ranks.said()))
                raise
        found = ranks.values()
    return {name: [outcomes[name] for outcomes in found] for name in rows}


def row_values(body: Callable[..., Any], size: int, rows: Rows, **further: Any) -> dict[str, list[Any]]:
    """The values of all ranks, by row; fails with the name of each row in which a rank raised. As run_rows()."""
    found = run_rows(body, size, rows, **further)
    failed = {name: [o.trace or o.message for o in found[name] if not o.ok] for name in found}
    texts = [f"{name}: {text}" for name, errors in failed.items() for text in errors]
    assert not texts, "\n".join([f"failed: {', '.join(name for name in failed if failed[name])}", *texts])
    return {name: [outcome.value for outcome in outcomes] for name, outcomes in found.items()}


def _call(rank: Rank, call: Callable[..., Any], *arguments: Any) -> Any:
    return call(rank, *arguments)


def values_in_turn(calls: Rows, size: int, *, deadline: float = DEADLINE) -> dict[str, list[Any]]:
    """As :func:`row_values`, where each row is a call of its own."""
    return row_values(_call, size, calls, deadline=deadline)


@contextlib.contextmanager
def row(*values: object) -> Iterator[None]:
    """An error inside says in which row it was raised. In a rank: groups that are made inside end with it."""
    try:
        with own_groups():
            yield
    except BaseException as error:
        error.add_note("in the row " + ", ".join(map(str, values)))
        raise


@contextlib.contextmanager
def own_groups() -> Iterator[None]:
    """Groups that are made inside end with it, unless it raises, or the default group has ended."""
    before = set(_groups())
    yield
    for group in _groups():
        if group not in before:
            dist.destroy_process_group(group)


def _groups() -> list[dist.ProcessGroup]:
    """Those of this process beside the default group, in the order in which they were made."""
    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def _in_one_group(rank: Rank, init: dict[str, Any], call: Callable[..., Any], *arguments: Any) -> Any:
    if not dist.is_initialized():
        rank.init(**init)
    return call(rank, *arguments)


def values_in_one_group(
    calls: Rows, size: int, *, backend: str = "gloo", deadline: float = DEADLINE, **init: Any
) -> dict[str, list[Any]]:
    """Of each call the values of all ranks; fails with the names of those that raise.

    Args:
        calls: By name, in the order in which all ranks make them. The default group is there already.
        size: Of the group.
        backend: Of the group.
        deadline: For each call, in seconds.
        **init: Further arguments of ``Rank.init``.
    """
    rows = {name: ({"backend": backend, **init}, *call) for name, call in calls.items()}
    return row_values(_in_one_group, size, rows, keep=True, deadline=deadline)


def meet(rank: Rank, word: str) -> None:
    """In a body: all ranks have come to this word; without a group."""
    (rank.folder / f"{word}{rank.rank}").touch()
    while not all((rank.folder / f"{word}{other}").exists() for other in range(rank.size)):
        time.sleep(0.005)


def await_others(rank: Rank) -> None:
    """In a body: until all other ranks have their outcome of the row."""
    while not _others_are_done(rank):
        time.sleep(0.005)


def _others_are_done(rank: Rank) -> bool:
    return all(_seen(rank, other).exists() for other in range(rank.size) if other != rank.rank)


def _over(name: str) -> str:
    return f"{name} is over"


def _walk(rank: Rank, body: Callable[..., Any], rows: Rows, victims: set[int], keep: bool) -> dict[str, Outcome]:
    found = {}
    for number, (name, arguments) in enumerate(rows.items()):
        folder = rank.folder / f"row{number}"
        folder.mkdir(exist_ok=True)
        one = rank.within(folder)
        if rank.rank in victims:
            found[name] = _run_in_child(one, body, arguments)
        else:
            before = set(_groups())
            found[name] = _run(one, body, arguments)
            if not found[name].ok:
                (folder / "failed").touch()
            _meet(one)
            kept = before if keep and not (folder / "failed").exists() else None
            _end_groups(found[name], kept)
        if not found[name].ok:
            rank.report(f"{name}: rank {rank.rank}: {found[name].trace or found[name].message}")
        rank.report(_over(name))
    if keep and dist.is_initialized():
        dist.destroy_process_group()
    return found


def _run(rank: Rank, body: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
    try:
        return Outcome(rank.rank, value=body(rank, *arguments))
    except BaseException as error:  # the test judges it
        return Outcome(rank.rank, error=type(error).__name__, message=str(error), trace=traceback.format_exc())


def _run_in_child(rank: Rank, body: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
    told = rank.folder / f"outcome of {rank.rank}"  # no pipe: children of the child would have it, too
    if (child := os.fork()) == 0:
        _child(rank, body, arguments, told)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if _others_are_done(rank):
            os.kill(child, signal.SIGCONT)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and told.exists():
        outcome: Outcome = pickle.loads(told.read_bytes())
        return outcome
    _come(rank)
    return Outcome(rank.rank, error="ProcessEnded", message=f"exit code {code}")


def _child(rank: Rank, body: Callable[..., Any], arguments: tuple[Any, ...], told: Path) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    outcome = _run(rank, body, arguments)
    _meet(rank)
    _end_groups(outcome)
    told.write_bytes(pickle.dumps(outcome))
    os._exit(0)


def _end_groups(outcome: Outcome, kept: Collection[dist.ProcessGroup] | None = None) -> None:
    """All of this process; kept: all but the default group and these."""
    try:
        if kept is not None:
            for group in _groups():
                if group not in kept:
                    dist.destroy_process_group(group)
        elif dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
    except Exception:
        # In place of an error that the body was to raise, too.
        outcome.trace = f"{outcome.trace}{traceback.format_exc()}"
        outcome.error, outcome.value = "GroupsDoNotEnd", None


def _seen(rank: Rank, other: int) -> Path:
    return rank.folder / f"rank {other} has its outcome"


def _come(rank: Rank) -> None:
    _seen(rank, rank.rank).touch()


def _meet(rank: Rank) -> None:
    """Without a group: a rank whose connections close tells the others what the code under test must tell them."""
    _come(rank)
    await_others(rank)
