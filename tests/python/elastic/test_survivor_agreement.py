"""Who goes on after a failure, as one worker hears it from the others in the store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from torchext.elastic import survivor_agreement
from torchext.elastic.member import Member
from torchext.elastic.membership_round import NextMembers, WorkerRoster
from torchext.elastic.survivor_agreement import SurvivorAgreement

ERROR = dist.DistBackendError("rank 2 is gone")


def member(members: int = 3) -> Member:
    """Number 0 of these."""
    return Member(HashStore(), WorkerRoster("token", list(range(members)), numbers=members), 0)


def lives(worker: Member, number: int, attempt: int = 0) -> None:
    worker.round(attempt).store.set(f"alive/{number}", "1")


def agreement(worker: Member, lost: Callable[[], set[int]] = set) -> SurvivorAgreement:
    return SurvivorAgreement(worker, ERROR, "it was killed", lost, timedelta(seconds=0.01))


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivor_agreement, "GRACE", 0.1)


def test_those_that_live_go_on_without_the_dead() -> None:
    worker = member()
    lives(worker, 1)
    assert agreement(worker, lambda: {2}).decide() == NextMembers([0, 1])


def test_more_than_half_do_not_wait_for_the_silent() -> None:
    worker = member()
    lives(worker, 1)
    assert agreement(worker).decide() == NextMembers([0, 1])


def test_a_minority_does_not_go_on() -> None:
    with pytest.raises(dist.DistBackendError, match=r"1 of 3 workers.* ranks \[1, 2\] have said nothing.*was killed"):
        agreement(member()).decide()


def test_the_dead_of_one_try_are_dead_in_the_next() -> None:
    """There the others have left the failed group, so that it tells nothing any more."""
    worker = member(4)  # of whom two would be a minority without that
    asked = []

    def lost() -> set[int]:
        asked.append(True)
        return {2, 3}

    lives(worker, 1)
    survivors = agreement(worker, lost)
    survivors.decide()
    before = len(asked)
    lives(worker, 1, attempt=1)
    assert survivors.decide(1) == NextMembers([0, 1])
    assert len(asked) == before


def test_where_all_live_the_error_is_another_matter() -> None:
    worker = member(2)
    for attempt in range(2):
        lives(worker, 1, attempt)
    survivors = agreement(worker)
    with pytest.raises(dist.DistBackendError) as caught:
        survivors.decide()
    assert caught.value is ERROR
    assert survivors.decide(1) == NextMembers([0, 1])  # one has missed a group, and lives


def test_who_is_on_no_list_is_told() -> None:
    worker = member()
    worker.round().write(NextMembers([1, 2]))
    with pytest.raises(dist.DistBackendError, match=r"train on without rank 0, .*\(it was killed\); start it anew"):
        agreement(worker).decide()


def test_a_store_that_does_not_answer() -> None:
    def lost() -> set[int]:
        raise dist.DistNetworkError("connection was reset")

    with pytest.raises(dist.DistBackendError, match=r"the store .* does not answer \(connection was reset\)"):
        agreement(member(), lost).decide()


def test_the_others_need_not_wait_for_who_is_interrupted() -> None:
    def interrupt() -> set[int]:
        raise KeyboardInterrupt

    worker = member()
    with pytest.raises(KeyboardInterrupt):
        agreement(worker, interrupt).decide()
    assert worker.has_left(0) and worker.round().concluded
