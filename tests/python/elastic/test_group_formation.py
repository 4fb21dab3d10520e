"""A worker comes to the next group, or does not, and says so in the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from torchext.elastic.group_formation import GroupFormation, LeftBehindError
from torchext.elastic.member import Member
from torchext.elastic.membership_round import FORMED, NextMembers, WorkerRoster
from torchext.options import DSSyncOptions, PragueOptions

FORMATION = GroupFormation("prague", PragueOptions(), is_world=True)
BOTH = NextMembers([0, 1])


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def member() -> Member:
    """Number 0 of three."""
    return Member(HashStore(), WorkerRoster("token", [0, 1, 2], numbers=3), 0)


def form(worker: Member, decided: NextMembers, attempt: int = 0) -> Any:
    before: Any = None  # a new world needs nothing of the one before
    return FORMATION.form(worker, decided, attempt, before)


def test_a_group_of_those_on_the_list() -> None:
    dist.init_process_group("prague", store=HashStore(), rank=0, world_size=1)
    worker, before = member(), dist.group.WORLD
    made = form(worker, NextMembers([0]))
    assert made is dist.group.WORLD and made is not before
    assert worker.round().conclude("none") == FORMED
    dist.all_reduce(torch.ones(1))


def test_who_comes_when_the_others_have_given_up_makes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupFormation, "_make", lambda *_: pytest.fail("made"))
    worker = member()
    worker.round(1).conclude("rank 1 did not come into it")
    with pytest.raises(dist.DistBackendError, match="rank 1 did not come into it") as caught:
        form(worker, BOTH, attempt=1)
    assert not isinstance(caught.value, LeftBehindError)
    assert not worker.has_left(0)


def test_who_cannot_come_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> None:
        raise dist.DistNetworkError("connection was refused")

    monkeypatch.setattr(GroupFormation, "_make", make)
    worker = member()
    with pytest.raises(dist.DistBackendError, match="rank 0 did not come into it: connection was refused"):
        form(worker, BOTH)
    assert worker.round().concluded and not worker.has_left(0)


def test_who_is_missing_in_a_group_that_stands_starts_anew() -> None:
    worker = member()
    worker.round().conclude(FORMED)
    with pytest.raises(LeftBehindError, match="the others train on without rank 0"):
        form(worker, BOTH)
    assert worker.roster.groups == 1 and worker.has_left(0)


def test_the_others_need_not_wait_for_who_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GroupFormation, "_make", make)
    worker = member()
    with pytest.raises(KeyboardInterrupt):
        form(worker, BOTH)
    assert worker.has_left(0) and worker.round().concluded


def test_where_newcomers_can_come() -> None:
    assert FORMATION.takes_newcomers
    assert not GroupFormation("prague", PragueOptions(), is_world=False).takes_newcomers
    assert not GroupFormation("dssync", DSSyncOptions(racks=[2, 2]), is_world=True).takes_newcomers
