"""What one worker tells the others in the store, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from torchext.elastic.member import Member
from torchext.elastic.membership_round import MembershipRound, NextMembers, WorkerRoster


def member(number: int, store: HashStore | None = None, members: int = 3) -> Member:
    return Member(store or HashStore(), WorkerRoster("token", list(range(members)), numbers=members), number)


def test_an_interrupted_worker_is_not_waited_for() -> None:
    store = HashStore()
    interrupted, other = member(0, store), member(1, store)
    interrupted.break_off(1, KeyboardInterrupt())
    assert other.has_left(0) and not other.has_left(1)
    assert not other.round(0).concluded
    assert other.round(1).conclude("formed") == "rank 0 was interrupted by a KeyboardInterrupt"


def test_who_stays_behind_is_missed_in_the_group_that_stands() -> None:
    store = HashStore()
    late, other = member(0, store), member(1, store)
    late.stay_behind()
    assert not other.has_left(0)
    other.enroll(NextMembers([0, 1]), "connection was reset")
    assert other.has_left(0)


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise dist.DistNetworkError("connection was reset")

    for name in ("has_left", "give_up"):
        monkeypatch.setattr(MembershipRound, name, gone)
    worker = member(0)
    assert not worker.has_left(1)
    worker.stay_behind()


@pytest.mark.parametrize(
    ("decided", "said"),
    [
        (NextMembers([0, 2]), "lost rank 1 (it died); training goes on with 2 workers, this one, rank 2, as rank 1"),
        (NextMembers([0, 1, 2], {"7": 3}), "rank 3 joined; training goes on with 4 workers"),
        (NextMembers([0, 1, 2]), "a newcomer did not come; training goes on with 3 workers"),
    ],
)
def test_whoever_trains_on_says_so(decided: NextMembers, said: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = member(2)
    worker.enroll(decided, "it died")
    assert said in caplog.text
    assert worker.roster.members == decided.members and worker.roster.groups == 1
