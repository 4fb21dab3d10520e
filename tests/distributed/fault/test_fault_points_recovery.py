"""Who trains on when one is killed at a named point: of training, of another's loss, of a newcomer's welcome."""

from __future__ import annotations

import collections
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere
from elastic_training import ElasticTraining
from fault_places import RECOVERY_POINTS, TRAINING_POINTS, Place
from harness import Outcome, Rank, launch
from rows import Rows, meet, run_rows
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
    if rank.rank == place.victim:
        _C.arm_fault_point(place.point, action, 1)
    while training.workers() == rank.size:
        training.train(1)
        if place.meets:
            training.sync.synchronize()
    return outcome_of(training)


def rows_of(action: str, *, small: bool = False) -> dict[str, Rows]:
    """By backend, of `body_in_training`; small: models that go in one message."""
    rows = collections.defaultdict[str, dict[str, tuple[Any, ...]]](dict)
    for place in TRAINING_POINTS:
        if place.backend != "dear" and not place.partial and (place.width == 16 or not small):
            rows[place.backend][str(place)] = (place, action)
    return dict(rows)


def check_in_training(rows: Rows, found: dict[str, list[Outcome]]) -> None:
    for name, outcomes in found.items():
        victim = rows[name][0].victim
        ended = [outcome.value for outcome in outcomes if outcome.rank != victim]
        assert ended == [([victim], [], 3)] * 3, (name, outcomes)


_KILLED, _FAILS = rows_of("kill"), rows_of("throw", small=True)


@pytest.mark.parametrize("backend", sorted(_KILLED))
def test_the_others_train_on_after_a_kill(backend: str) -> None:
    rows = _KILLED[backend]
    found = run_rows(body_in_training, 4, rows, victims={place.victim for place, _ in rows.values()})
    check_in_training(rows, found)


@pytest.mark.parametrize("backend", sorted(_FAILS))
def test_the_others_train_on_without_one_that_fails(backend: str) -> None:
    """It has an error of its own, and its script may live: the others do not wait for it."""
    rows = _FAILS[backend]
    found = run_rows(body_in_training, 4, rows)
    check_in_training(rows, found)
    for name, outcomes in found.items():
        place = rows[name][0]
        assert f"fault point {place.point}" in outcomes[place.victim].message, (name, outcomes)


# ---- A second fault, in the recovery from the first ----


def body_in_recovery(rank: Rank, backend: str, point: str, action: str, victim: int, own_group: bool) -> Any:
    """Rank 1 is killed when all have trained; the victim fails when it comes to the point behind that."""
    hurry()
    training = ElasticTraining(rank, backend, {}, own_group=own_group)
    training.train(3)
    if rank.rank == victim:
        _C.arm_fault_point(point, action)
    meet(rank, "armed")
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    left = rank.size - (2 if action == "kill" or point == "group.formed" else 1)
    while training.workers() > left:
        training.train(1)
    return outcome_of(training)


IN_RECOVERY = sorted(point for point in RECOVERY_POINTS if not point.startswith("state_transfer"))


Recovery = tuple[str, str, str, int, bool]  # arguments of body_in_recovery


def killed(point: str, backend: str, victim: int, own_group: bool = False) -> tuple[str, Recovery]:
    """A row, and its name."""
    name = f"{point}-{backend}{'-own group' * own_group}"
    return name, (backend, point, "kill", victim, own_group)


# Rank 0 watches rank 1, and is the first of the workers.
_MOST = [point for point in IN_RECOVERY if point != "fault_message.heard"]
_SECOND_KILLS = {
    "prague": [killed(point, "prague", 0) for point in IN_RECOVERY],
    "hop": [killed(point, "hop", 0) for point in IN_RECOVERY],
    "dssync": [killed(point, "dssync", 3) for point in _MOST],
    "own group": [killed(point, "prague", 3, True) for point in _MOST],
}
_EACH_POINT = [
    *(killed(point, "prague", 0) for point in ("fault_message.heard", "membership.alive", "membership.listed")),
    killed("group.connected", "hop", 0),
    killed("group.arrived", "dssync", 3),
    killed("group.formed", "prague", 3, True),
]


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(_EACH_POINT, id="each point"),
        *(pytest.param(table, marks=pytest.mark.slow, id=name) for name, table in _SECOND_KILLS.items()),
    ],
)
def test_another_is_killed_in_recovery(table: list[tuple[str, Recovery]]) -> None:
    rows = dict(table)
    for name, outcomes in run_rows(body_in_recovery, 5, rows, victims={1, *(row[3] for row in rows.values())}).items():
        victim = rows[name][3]
        assert outcomes[victim].message == "exit code -9", (name, outcomes[victim])
        left = [outcome.value for outcome in outcomes if outcome.rank not in (1, victim)]
        assert left == [(sorted([1, victim]), [], 3)] * 3, (name, outcomes)


def test_another_fails_in_recovery() -> None:
    """A group that does not come about is made anew, with all. Where the group stands, who fails is told so.

    The others miss it there; it does not wait for another list, on which it could not be.
    """
    points = ("group.arrived", "group.connected", "group.formed")
    rows: dict[str, Recovery] = {point: ("prague", point, "throw", 3, False) for point in points}
    for name, outcomes in run_rows(body_in_recovery, 5, rows, victims={1}).items():
        if name == "group.formed":
            failed = outcomes[3]
            assert failed.error == "LeftBehindError" and "without rank 3, which could not come" in failed.message, (
                failed
            )
            left = [outcomes[rank].value for rank in (0, 2, 4)]
            assert left == [([1, 3], [], 3)] * 3, outcomes
        else:
            left = [outcomes[rank].value for rank in (0, 2, 3, 4)]
            assert left == [([1], [], 4)] * 4, (name, outcomes)


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
        assert failed.error == "LeftBehindError", failed
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


def test_one_of_a_newcomers_welcome_is_killed() -> None:
    """Who hands over: the newcomer asks again, and gets the state of the next worker. Or the newcomer itself."""
    rows = {"hands over": ("state_transfer.sending", 0), "takes over": ("state_transfer.receiving", 3)}
    found = run_rows(body_welcome, 4, rows, victims={0, 3})
    for name, outcomes in found.items():
        assert outcomes[rows[name][1]].message == "exit code -9", (name, outcomes)
    # Its first number is lost with the group that it was let into.
    assert [outcome.value for outcome in found["hands over"][1:]] == [([0, 3], [3, 4], 3)] * 3, found
    assert [outcome.value for outcome in found["takes over"][:3]] == [([3], [3], 3)] * 3, found
