"""A rank is killed, stopped, or runs into an exception at a named point of the code; recovery has a file of its own.

Every point that a collective or training passes, with every backend that passes it, the first time and a later one.
Those of one backend are rows of one case: each has a group of its own, in the same processes.
"""

from __future__ import annotations

import collections
import re
import signal
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS, Trainer
from fault_places import CALL_POINTS, RECOVERY_POINTS, TRAINING_POINTS, Place
from harness import Outcome, Rank, elapsed_error
from rows import Rows, run_rows
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


def values_of(name: str, outcomes: list[Outcome], ranks: Iterable[int]) -> list[Any]:
    for rank in ranks:
        assert outcomes[rank].ok, (name, rank, outcomes[rank].trace or outcomes[rank].message)
    return [outcomes[rank].value for rank in ranks]


def check_survivor(name: str, value: Any, place: Place, says: str) -> str:
    """That rank's outcome; returns the reason that its group keeps."""
    (kind, text, _), (kind2, text2, seconds2), untouched, failure = value
    assert kind == kind2 == "DistBackendError", (name, value)
    assert re.search(says, text) and re.search(says, text2), (name, value)
    assert seconds2 < 3, name  # at once, but for a loaded machine
    assert untouched == [7.0] * 4, name
    assert failure[0] == place.victim, (name, value)
    return str(failure[1])


def by_backend(places: Iterable[Place], action: str, passes: int, heartbeat: float) -> dict[str, Rows]:
    """Rows of `body`."""
    rows = collections.defaultdict[str, dict[str, tuple[Any, ...]]](dict)
    for place in places:
        rows[place.backend][str(place)] = (place, action, passes, heartbeat)
    return dict(rows)


def test_every_point_has_a_test() -> None:
    tested = {place.point for place in TRAINING_POINTS} | CALL_POINTS | RECOVERY_POINTS
    tested.add("averaged.state")  # in test_averaged_state.py
    assert tested == set(_C.FAULT_POINTS)


# In calls a rank also ends, or raises, in tests/cpp/c10d: at any message, whatever the backend.
ALL = [*(Place(point, "prague") for point in sorted(CALL_POINTS)), *TRAINING_POINTS]


@pytest.mark.parametrize("passes", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", sorted({place.backend for place in ALL}))
def test_a_rank_is_killed(backend: str, passes: int) -> None:
    rows = by_backend(ALL, "kill", passes, 5.0)[backend]
    victims = {place.victim for place, *_ in rows.values()}
    for name, outcomes in run_rows(body, SIZE, rows, victims=victims).items():
        place = rows[name][0]
        died = outcomes[place.victim]
        assert died.error == "ProcessEnded" and died.message == f"exit code {-signal.SIGKILL}", (name, died)
        values = values_of(name, outcomes, others(place))
        reasons = {check_survivor(name, value, place, f"rank {place.victim} died") for value in values}
        assert len(reasons) == 1, (name, reasons)
        assert max(seconds for (_, _, seconds), *_ in values) < DEATH_LIMIT, (name, values)


# Silence is the heartbeats' to see, wherever the rank is: one place of each backend is quick.
_FIRST = {place.backend: place for place in reversed(ALL)}.values()
_STOPPED = [
    pytest.param(_FIRST, id="one of each backend"),
    *(
        pytest.param([place for place in ALL if place.backend == first.backend], marks=pytest.mark.slow, id=str(first))
        for first in _FIRST
    ),
]


@pytest.mark.parametrize("places", _STOPPED)
def test_a_rank_is_stopped(places: Iterable[Place]) -> None:
    # Long: busy neighbours delay those that live.
    rows = {str(place): (place, "stop", 1, 4.0) for place in places}
    for name, outcomes in run_rows(body, SIZE, rows, victims={place.victim for place in places}).items():
        place = rows[name][0]
        silent = f"rank {place.victim} has been silent for"
        values = values_of(name, outcomes, others(place))
        reasons = {check_survivor(name, value, place, silent) for value in values}
        assert len(reasons) == 1, (name, reasons)
        # Woken up, it learns the same, and does not hang.
        late = outcomes[place.victim]
        assert late.ok and late.value[0][0] == "DistBackendError", (name, late)


_RAISES = by_backend((place for place in TRAINING_POINTS if not place.partial), "throw", 1, 5.0)


@pytest.mark.parametrize("backend", sorted(_RAISES))
def test_a_rank_raises(backend: str) -> None:
    rows = _RAISES[backend]
    for name, outcomes in run_rows(body, SIZE, rows).items():
        place = rows[name][0]
        for (_, text, _), (kind2, text2, _), untouched, failure in values_of(name, outcomes, range(SIZE)):
            assert f"fault point {place.point}" in text and kind2 == "DistBackendError", (name, text, kind2)
            assert f"fault point {place.point}" in text2 and untouched == [7.0] * 4, (name, text2, untouched)
            assert failure[0] == place.victim, (name, failure)
