"""Newcomers and workers that are gone while a newcomer is let in."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from attached import equal_everywhere, flat
from elastic_training import ElasticTraining, stop_when_connecting
from harness import Rank, launch
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.elastic import membership_round
from torchext.elastic.newcomers import Newcomer, NewcomerAdmission

pytestmark = pytest.mark.sanitize


def body_ghosts(rank: Rank) -> Any:
    """Rank 2 dies while it waits, rank 3 when the others wait for it; rank 4 joins."""
    membership_round.CONNECTING = timedelta(seconds=3)
    if rank.rank == 2:
        torchext.join_running_job("prague", f"file://{rank.folder / 'store'}")
        ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
        rank.report("waits")
        torchext.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), on_peer_failure="continue")
    if rank.rank in (3, 4):
        rank.pause()
    if rank.rank == 3:
        real = Newcomer.ask

        def ask(self: Newcomer, *brought: Any) -> Any:
            answer = real(self, *brought)
            rank.report("let in")
            rank.pause()
            return answer

        Newcomer.ask = ask  # type: ignore[method-assign]
    if rank.rank < 2:
        rank.pause()  # until the ghost has left its request
    training = ElasticTraining(rank, "prague", {}, workers=2)
    if rank.rank < 2:
        rank.report("trains")
        training.grow_to(3)
    training.train(5)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["workers"], stats["lost_ranks"], len(stats["joined_ranks"]), flat(training.ddp.module).isfinite().all()


def test_newcomers_that_die_on_the_doorstep() -> None:
    with launch(body_ghosts, 5) as ranks:
        ranks.expect("waits", [2])
        time.sleep(0.5)
        ranks.kill(2)
        ranks.proceed([0, 1])
        ranks.expect("trains", [0, 1])
        ranks.proceed([3])
        ranks.expect("let in", [3])
        ranks.kill(3)
        ranks.proceed([4])
        assert [value[:3] for value in ranks.values()] == [(3, [], 1)] * 3


def body_heard_in_vain(rank: Rank) -> Any:
    """The first worker hears a newcomer, and dies before it lets it in."""
    if rank.rank == 3:
        rank.pause()
    if rank.rank == 0:

        def admit(*_: Any) -> None:
            rank.report("heard")
            rank.pause()

        NewcomerAdmission.admit = admit  # type: ignore[method-assign]
    training = ElasticTraining(rank, "prague", {}, workers=3)
    if rank.rank < 3:
        rank.report("trains")
    training.meet_until(lambda stats: bool(stats["joined_ranks"]), steps=1)
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["workers"], stats["lost_ranks"], stats["joined_ranks"]


def test_a_newcomer_is_heard_in_vain_and_comes_in_all_the_same() -> None:
    with launch(body_heard_in_vain, 4) as ranks:
        ranks.expect("trains", [0, 1, 2])
        ranks.proceed([3])
        ranks.expect("heard", [0])
        ranks.kill(0)
        assert ranks.values() == [(3, [0], [3])] * 3


def body_stopped_in_the_door(rank: Rank, stopped: int) -> Any:
    """Four workers and a newcomer make a group, and one of the five is gone when they connect."""
    membership_round.CONNECTING = timedelta(seconds=2)
    if rank.rank == 5:
        rank.pause()
    if rank.rank == 4 and stopped == 4:
        stop_when_connecting()
    training = ElasticTraining(rank, "prague", {}, workers=4)
    if rank.rank == stopped:
        stop_when_connecting()
    if rank.rank < 4:
        rank.report("trains")
    training.meet_until(lambda stats: stats["workers"] == 4 + (stopped == 4) and bool(stats["joined_ranks"]))
    training.train(5)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["lost_ranks"], len(stats["joined_ranks"])


@pytest.mark.parametrize("stopped", [2, 4], ids=["a worker", "the newcomer"])
def test_one_is_gone_when_a_newcomer_comes(stopped: int) -> None:
    with launch(body_stopped_in_the_door, 6, stopped) as ranks:
        ranks.expect("trains", range(4))
        ranks.expect_stopped(stopped, deadline=30)
        if stopped == 4:
            ranks.proceed([5])
        staying = [rank for rank in range(6) if rank != stopped and (rank != 5 or stopped == 4)]
        outcomes = ranks.outcomes(staying, deadline=50)
        ranks.kill(stopped)
        ranks.kill(5)
    lost = [2] if stopped == 2 else []
    assert [outcome.value for outcome in outcomes] == [(lost, 1)] * len(staying), outcomes
