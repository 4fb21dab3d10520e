"""A rank is killed, stopped, or runs into an exception at a named point of the code; recovery has a file of its own.

Every point that a collective or training passes, with every backend that passes it, the first time and a later one.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS, Trainer
from fault_places import CALL_POINTS, RECOVERY_POINTS, TRAINING_POINTS, Place
from harness import Rank, elapsed_error, launch
from torch import nn

import torchext
from torchext import _C

pytestmark = pytest.mark.sanitize

SIZE = 4
# Generous: a loaded machine's share comes on top. Gloo by itself needs the group's timeout.
DEATH_LIMIT = 10.0


def init(rank: Rank, place: Place, heartbeat: float = 5.0) -> None:
    options = OPTIONS[place.backend](
        heartbeat_timeout=timedelta(seconds=heartbeat), timeout=timedelta(seconds=60), **dict(place.options)
    )
    rank.init(place.backend, timeout=60, pg_options=options)


def calls(_rank: Rank, _place: Place) -> Callable[[], None]:
    sizes = iter(range(1, 1_000_000))

    def call() -> None:  # of a size of its own: no call is predicted
        tensor = torch.ones(next(sizes))
        dist.all_reduce(tensor)
        assert tensor[0].item() == SIZE

    return call


def partial(_rank: Rank, _place: Place) -> Callable[[], None]:
    def call() -> None:
        tensor = torch.full((10,), 3.0)
        torchext.backend_of().partial_all_reduce(tensor, list(range(SIZE))).wait()
        assert tensor.eq(3.0).all()

    return call


def training(rank: Rank, place: Place) -> Callable[[], None]:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(8, place.width), nn.Tanh(), nn.Linear(place.width, 1))
    trainer = Trainer(rank, model=wide, group=dist.group.WORLD, bucket_mb=place.bucket_mb, lr=place.lr)

    def step() -> None:
        trainer.step()
        if place.meets:
            trainer.sync.synchronize()

    return step


def body(rank: Rank, place: Place, action: str, passes: int, heartbeat: float) -> Any:
    init(rank, place, heartbeat)
    step = (calls if place.point in CALL_POINTS else partial if place.partial else training)(rank, place)
    for _ in range(3):
        step()
    dist.barrier()
    rank.report("ready")  # before it is armed: its threads may pass the point from then on
    if rank.rank == place.victim:
        _C.arm_fault_point(place.point, action, passes)

    def forever() -> None:
        while True:
            step()

    first = elapsed_error(forever)
    untouched = torch.full((4,), 7.0)
    second = elapsed_error(lambda: dist.all_reduce(untouched))
    return first, second, untouched.tolist(), torchext.backend_of().failure


def others(place: Place) -> list[int]:
    return [rank for rank in range(SIZE) if rank != place.victim]


def check_survivor(value: Any, place: Place, says: str) -> str:
    """That rank's outcome; returns the reason that its group keeps."""
    (kind, text, _), (kind2, text2, seconds2), untouched, failure = value
    assert kind == kind2 == "DistBackendError", value
    assert re.search(says, text) and re.search(says, text2), value
    assert seconds2 < 3  # at once, but for a loaded machine
    assert untouched == [7.0] * 4
    assert failure[0] == place.victim, value
    return str(failure[1])


def test_every_point_has_a_test() -> None:
    tested = {place.point for place in TRAINING_POINTS} | CALL_POINTS | RECOVERY_POINTS
    tested.add("averaged.state")  # in test_averaged_state.py
    assert tested == set(_C.FAULT_POINTS)


# In calls a rank also ends, or raises, in tests/cpp/c10d: at any message, whatever the backend.
ALL = [*(Place(point, "prague") for point in sorted(CALL_POINTS)), *TRAINING_POINTS]


@pytest.mark.parametrize("place", ALL, ids=str)
@pytest.mark.parametrize("passes", [0, 3])
def test_a_rank_is_killed(place: Place, passes: int) -> None:
    with launch(body, SIZE, place, "kill", passes, 5.0) as ranks:
        ranks.expect("ready")
        start = time.monotonic()
        reasons = {
            check_survivor(outcome.value, place, f"rank {place.victim} died")
            for outcome in ranks.outcomes(others(place), deadline=30)
        }
        assert time.monotonic() - start < DEATH_LIMIT
        (died,) = ranks.outcomes([place.victim], deadline=5)
        assert died.error == "ProcessEnded" and ranks.exit_code(place.victim) == -signal.SIGKILL
    assert len(reasons) == 1, reasons


# Silence is the heartbeats' to see, wherever the rank is: one place of each backend is quick.
_FIRST = {place.backend: place for place in reversed(ALL)}.values()


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=() if place in _FIRST else pytest.mark.slow) for place in ALL], ids=str
)
def test_a_rank_is_stopped(place: Place) -> None:
    with launch(body, SIZE, place, "stop", 1, 4.0) as ranks:  # long: busy neighbours delay those that live
        ranks.expect("ready")
        silent = f"rank {place.victim} has been silent for"
        reasons = {
            check_survivor(outcome.value, place, silent) for outcome in ranks.outcomes(others(place), deadline=30)
        }
        # Woken up, it learns the same, and does not hang.
        ranks.kill(place.victim, signal.SIGCONT)
        (late,) = ranks.outcomes([place.victim], deadline=30)
        assert late.ok and late.value[0][0] == "DistBackendError", late
    assert len(reasons) == 1, reasons


@pytest.mark.parametrize("place", [place for place in TRAINING_POINTS if not place.partial], ids=str)
def test_a_rank_raises(place: Place) -> None:
    with launch(body, SIZE, place, "throw", 1, 5.0) as ranks:
        ranks.expect("ready")
        for outcome in ranks.outcomes(deadline=30):
            assert outcome.ok, outcome.trace
            (_, text, _), (kind2, text2, _), untouched, failure = outcome.value
            assert f"fault point {place.point}" in text and kind2 == "DistBackendError", outcome
            assert f"fault point {place.point}" in text2 and untouched == [7.0] * 4, outcome
            assert failure[0] == place.victim, outcome
