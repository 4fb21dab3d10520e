"""The group that the living make after a death: who is missed in it, and who comes late."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from attached import equal_everywhere
from elastic_training import ElasticTraining, stop_when_connecting
from harness import Rank, launch

from torchext.elastic import membership_round, survivor_agreement
from torchext.elastic.group_formation import GroupFormation

pytestmark = pytest.mark.sanitize


def body_stopped(rank: Rank, backend: str, stopped: int, own_group: bool) -> Any:
    membership_round.CONNECTING = timedelta(seconds=2)
    training = ElasticTraining(rank, backend, {}, own_group=own_group)
    training.train(5)
    if rank.rank == stopped:
        stop_when_connecting()
    rank.report("ready")
    while training.workers() > 3:
        training.train(1)
    training.train(10)
    training.sync.synchronize()
    group = training.ddp.process_group
    equal_everywhere(training.ddp.module, group)
    return training.sync.stats()["lost_ranks"], dist.get_world_size(group)


@pytest.mark.parametrize(
    ("backend", "stopped", "own_group"),
    [
        ("prague", 2, False),
        ("hop", 0, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("hop", 2, False), ("prague", 0, False), ("prague", 2, True))
        ),
    ],
)
def test_one_is_gone_when_the_others_connect(backend: str, stopped: int, own_group: bool) -> None:
    """It has come to the new group and is missed there: neither for a group's timeout, nor as long as one may come."""
    with launch(body_stopped, 5, backend, stopped, own_group) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        ranks.expect_stopped(stopped, deadline=30)
        outcomes = ranks.outcomes([rank for rank in range(5) if rank not in (1, stopped)], deadline=25)
        ranks.kill(stopped)
    assert [outcome.value for outcome in outcomes] == [(sorted([1, stopped]), 3)] * 3, outcomes


def body_late(rank: Rank, own_group: bool) -> Any:
    membership_round.PATIENCE = timedelta(seconds=6)
    survivor_agreement.GRACE = 10.0  # the late one has not heard that the others ask who lives
    real = GroupFormation.form

    def form(self: Any, member: Any, decided: Any, attempt: int, before: Any) -> Any:
        if rank.rank == 2 and attempt == 0:
            time.sleep(8)  # a long step: the others have given the first group up
        return real(self, member, decided, attempt, before)

    GroupFormation.form = form  # type: ignore[method-assign]
    training = ElasticTraining(rank, "prague", {}, own_group=own_group)
    training.train(3)
    rank.report("ready")
    while training.workers() == 5:
        training.train(1)
    training.sync.synchronize()
    group = training.ddp.process_group
    equal_everywhere(training.ddp.module, group)
    return training.sync.stats()["lost_ranks"], dist.get_world_size(group)


# A model's own group is made otherwise, which the test above has; who waits for whom is the same.
@pytest.mark.parametrize("own_group", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_comes_too_late_to_a_new_group_comes_to_the_next(own_group: bool) -> None:
    with launch(body_late, 5, own_group) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        assert [outcome.value for outcome in ranks.outcomes(deadline=60)] == [([1], 4)] * 4


def body_interrupted(rank: Rank, owner: Any, name: str) -> Any:
    training = ElasticTraining(rank, "prague", {})
    training.train(3)
    if rank.rank == 2:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        setattr(owner, name, interrupt)
    rank.report("ready")
    interrupted = False
    try:
        while training.workers() == 5:
            training.train(1)
    except KeyboardInterrupt:
        interrupted = True
        rank.report("interrupted")
        rank.pause()  # it lives, and whatever connections it has
        return interrupted, None, None
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return interrupted, sorted(stats["lost_ranks"]), stats["recovery_ms"] < 10_000


@pytest.mark.parametrize(
    ("owner", "name"),
    [(membership_round.MembershipRound, "read"), (GroupFormation, "_make")],
    ids=["when it is decided", "when it connects"],
)
def test_who_is_interrupted_among_those_that_go_on_is_not_waited_for(owner: Any, name: str) -> None:
    """By Ctrl-C, say, when it is on the list already, or in the middle of connecting."""
    with launch(body_interrupted, 5, owner, name) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        ranks.expect("interrupted", [2], deadline=30)
        others = ranks.outcomes([0, 3, 4], deadline=40)
        ranks.proceed()
        assert ranks.outcomes([2])[0].value == (True, None, None)
    assert [outcome.value for outcome in others] == [(False, [1, 2], True)] * 3, others
