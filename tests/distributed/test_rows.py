"""What rows.py promises to the other tests."""

from __future__ import annotations

import os
import re
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Rank
from rows import await_others, meet, row, row_values, run_rows, values_in_one_group


class Crashing:
    """Ends its process when the garbage collector comes to it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def body(rank: Rank, what: str) -> tuple[int, str]:
    (rank.folder / f"{what}{rank.rank}").touch()
    meet(rank, "begun")
    if rank.rank == 1 and what == "raises":
        raise KeyError(what)
    if rank.rank == 1 and what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 1 and what == "crashes later":
        Crashing()
    if rank.rank == 1 and what == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank.rank == 1 and what == "comes last":
        await_others(rank)
    if rank.rank == 0 and what == "never ends":
        signal.pause()
    if rank.rank == 0 and what == "keeps its groups":
        mock.patch("torch.distributed.is_initialized", side_effect=OSError).start()
        raise KeyError(what)
    return rank.rank, " ".join(sorted(path.name for path in rank.folder.iterdir() if what in path.name))


def test_rows_run_by_themselves_whatever_becomes_of_others() -> None:
    names = ("raises", "is killed", "crashes later", "is stopped", "comes last", "keeps its groups")
    rows = {what: (what,) for what in names}
    found = run_rows(body, 2, rows, victims={1})
    kept = found.pop("keeps its groups")[0]  # an error that was to be raised hides nothing
    assert kept.error == "GroupsDoNotEnd" and "KeyError" in kept.trace and "OSError" in kept.trace, kept
    for what, outcomes in found.items():
        assert outcomes[0].value == (0, f"{what}0 {what}1"), outcomes
    assert (found["raises"][1].error, found["raises"][1].message) == ("KeyError", "'raises'")
    for what in ("is killed", "crashes later"):
        assert (found[what][1].error, found[what][1].message) == ("ProcessEnded", "exit code -9")
    assert all(found[what][1].value == (1, f"{what}0 {what}1") for what in ("is stopped", "comes last")), found


def test_a_row_that_fails_or_does_not_end_is_named() -> None:
    with pytest.raises(AssertionError, match=r"^failed: raises\nraises: Traceback(.|\n)*KeyError: 'raises'"):
        row_values(body, 2, {"raises": ("raises",), "comes last": ("comes last",)})
    with pytest.raises(AssertionError, match="no report 'never ends is over' within 2 s") as caught:
        run_rows(body, 2, {"raises": ("raises",), "never ends": ("never ends",)}, deadline=2)
    assert re.search(r'test_rows\.py", line \d+ in body', str(caught.value)), caught.value
    assert "raises: rank 1: Traceback" in "\n".join(caught.value.__notes__), caught.value.__notes__


def call(rank: Rank, raises: bool) -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    if raises and rank.rank == 1:
        raise KeyError("raised")
    return total.item()


def test_calls_in_one_group_go_on_behind_one_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"^failed: first, third\nfirst: Traceback(.|\n)*third: Traceback"):
        values_in_one_group({"first": (call, True), "second": (call, False), "third": (call, True)}, 2)
    assert values_in_one_group({"one": (call, False), "other": (call, False)}, 2) == {"one": [2, 2], "other": [2, 2]}


made: list[dist.ProcessGroup] = []


def body_groups(_: Rank) -> list[bool]:
    """Makes a group, and one in a block; which of all that its process has made are there."""
    made.append(dist.new_group())
    with row("a row"):
        made.append(dist.new_group())
    return [group in dist.distributed_c10d._world.pg_map for group in made]


def test_groups_end_with_their_row() -> None:
    first, second = values_in_one_group({"first": (body_groups,), "second": (body_groups,)}, 2).values()
    assert first == [[True, False]] * 2
    assert second == [[False, False, True, False]] * 2
