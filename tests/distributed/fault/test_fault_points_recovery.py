"""Who trains on when one is killed at a named point: of training, of another's loss, of a newcomer's welcome."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere
from elastic_training import ElasticTraining
from fault_places import RECOVERY_POINTS, TRAINING_POINTS, Place
from harness import Rank, launch
from torch import nn

from torchext import _C
from torchext.elastic import membership_round

pytestmark = pytest.mark.sanitize


def hurry() -> None:
    """Those that have died are missed sooner."""
    membership_round.PATIENCE = timedelta(seconds=4)
    membership_round.CONNECTING = timedelta(seconds=2)


def outcome_of(training: ElasticTraining) -> Any:
    """Trains on, and looks whether all end with one model."""
    training.train(5)
    training.sync.synchronize()
    group = training.ddp.process_group
    equal_everywhere(training.ddp.module, group)
    stats = training.sync.stats()
    return sorted(stats["lost_ranks"]), stats["joined_ranks"], dist.get_world_size(group)


def body_in_training(rank: Rank, place: Place, action: str) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, place.width), nn.Tanh(), nn.Linear(place.width, 1))
    training = ElasticTraining(rank, place.backend, dict(place.options), module=module)
    training.optimizer.param_groups[0]["lr"] = place.lr
    training.train(3)
    rank.report("ready")  # before it is armed: its threads may pass the point from then on
    if rank.rank == place.victim:
        _C.arm_fault_point(place.point, action, 1)
    while training.workers() == rank.size:
        training.train(1)
        if place.meets:
            training.sync.synchronize()
    return outcome_of(training)


@pytest.mark.parametrize("place", [p for p in TRAINING_POINTS if p.backend != "dear" and not p.partial], ids=str)
def test_the_others_train_on_after_a_kill(place: Place) -> None:
    with launch(body_in_training, 4, place, "kill") as ranks:
        ranks.expect("ready")
        others = [rank for rank in range(4) if rank != place.victim]
        outcomes = ranks.outcomes(others, deadline=60)
    assert [outcome.value for outcome in outcomes] == [([place.victim], [], 3)] * 3, outcomes


@pytest.mark.parametrize(
    "place", [p for p in TRAINING_POINTS if p.backend != "dear" and not p.partial and p.width == 16], ids=str
)
def test_the_others_train_on_without_one_that_fails(place: Place) -> None:
    """It has an error of its own, and its script may live: the others do not wait for it."""
    with launch(body_in_training, 4, place, "throw") as ranks:
        ranks.expect("ready")
        others = [rank for rank in range(4) if rank != place.victim]
        outcomes = ranks.outcomes(others, deadline=60)
        (failed,) = ranks.outcomes([place.victim], deadline=20)
        assert f"fault point {place.point}" in failed.message, failed
    assert [outcome.value for outcome in outcomes] == [([place.victim], [], 3)] * 3, outcomes


# ---- A second fault, in the recovery from the first ----


def body_in_recovery(rank: Rank, backend: str, point: str, action: str, victim: int, own_group: bool) -> Any:
    hurry()
    training = ElasticTraining(rank, backend, {}, own_group=own_group)
    training.train(3)
    if rank.rank == victim:
        _C.arm_fault_point(point, action)
    rank.report("ready")
    left = rank.size - (2 if action == "kill" or point == "group.formed" else 1)
    while training.workers() > left:
        training.train(1)
    return outcome_of(training)


IN_RECOVERY = sorted(point for point in RECOVERY_POINTS if not point.startswith("state_transfer"))


# Rank 0 watches rank 1, and is the first of the workers.
@pytest.mark.parametrize(
    ("point", "backend", "victim", "own_group"),
    [
        *((point, "prague", 0, False) for point in IN_RECOVERY),
        *((point, "hop", 0, False) for point in IN_RECOVERY),
        *((point, "dssync", 3, False) for point in IN_RECOVERY if point != "fault_message.heard"),
        *((point, "prague", 3, True) for point in IN_RECOVERY if point != "fault_message.heard"),
    ],
)
def test_another_is_killed_in_recovery(point: str, backend: str, victim: int, own_group: bool) -> None:
    with launch(body_in_recovery, 5, backend, point, "kill", victim, own_group) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        outcomes = ranks.outcomes([rank for rank in range(5) if rank not in (1, victim)], deadline=60)
        assert ranks.exit_code(victim) == -9
    assert [outcome.value for outcome in outcomes] == [(sorted([1, victim]), [], 3)] * 3, outcomes


@pytest.mark.parametrize("point", ["group.arrived", "group.connected"])
def test_a_group_that_does_not_come_about_is_made_anew(point: str) -> None:
    with launch(body_in_recovery, 5, "prague", point, "throw", 3, False) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        outcomes = ranks.outcomes(deadline=60)
    assert [outcome.value for outcome in outcomes] == [([1], [], 4)] * 4, outcomes


def test_who_fails_when_the_group_stands_is_told_so() -> None:
    """The others miss it there; it does not wait for another list, on which it could not be."""
    with launch(body_in_recovery, 5, "prague", "group.formed", "throw", 3, False) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        (failed,) = ranks.outcomes([3], deadline=20)
        assert failed.error == "_LeftBehind" and "without rank 3, which could not come" in failed.message, failed
        outcomes = ranks.outcomes([0, 2, 4], deadline=60)
    assert [outcome.value for outcome in outcomes] == [([1, 3], [], 3)] * 3, outcomes


def body_comes_late(rank: Rank) -> Any:
    hurry()
    training = ElasticTraining(rank, "prague", {})
    training.train(3)
    if action := {2: "stop", 3: "throw"}.get(rank.rank):
        _C.arm_fault_point("group.formed", action)
    rank.report("ready")
    while training.workers() > 3:
        training.train(1)
    return outcome_of(training)


def test_a_dead_peer_where_a_group_is_finished_is_a_failure_of_that_group() -> None:
    """Rank 2 finishes a group that stands already when rank 3 has left it: it goes on, as the others do."""
    with launch(body_comes_late, 5) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        ranks.expect_stopped(2)
        (failed,) = ranks.outcomes([3], deadline=20)
        assert failed.error == "_LeftBehind", failed
        ranks.kill(2, signal.SIGCONT)
        outcomes = ranks.outcomes([0, 2, 4], deadline=60)
    assert [outcome.value for outcome in outcomes] == [([1, 3], [], 3)] * 3, outcomes


# ---- A newcomer's welcome ----


def body_welcome(rank: Rank, point: str, victim: int) -> Any:
    hurry()
    if rank.rank == victim:
        _C.arm_fault_point(point, "kill")
    training = ElasticTraining(rank, "prague", {}, workers=3)
    training.meet_until(lambda stats: victim in stats["lost_ranks"] and stats["workers"] == 3)
    return outcome_of(training)


def test_who_hands_over_is_killed() -> None:
    """The newcomer asks again, and gets the state of the next worker."""
    with launch(body_welcome, 4, "state_transfer.sending", 0) as ranks:
        outcomes = ranks.outcomes([1, 2, 3], deadline=60)
        assert ranks.exit_code(0) == -9
    # Its first number is lost with the group that it was let into.
    assert [outcome.value for outcome in outcomes] == [([0, 3], [3, 4], 3)] * 3, outcomes


def test_a_newcomer_is_killed_when_it_takes_over() -> None:
    with launch(body_welcome, 4, "state_transfer.receiving", 3) as ranks:
        outcomes = ranks.outcomes([0, 1, 2], deadline=60)
        assert ranks.exit_code(3) == -9
    assert [outcome.value for outcome in outcomes] == [([3], [3], 3)] * 3, outcomes
