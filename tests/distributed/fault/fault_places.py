"""Where the tests of fault points have a rank fail: in calls, in training, and when the living go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A point, and a training that passes it."""

    point: str
    backend: str
    victim: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    width: int = 16  # of the model's hidden layer
    bucket_mb: float = 0.001
    meets: bool = False  # for an exact average after each step
    partial: bool = False  # no training, but calls of partial_all_reduce

    @property
    def lr(self) -> float:
        """Where no training diverges."""
        return 0.16 / self.width**2

    def __str__(self) -> str:
        return f"{self.point}-{self.backend}{'-partial' * self.partial}"


CALL_POINTS = {"call.asked", "call.agreed", "call.started"}

_SOCKETS = (("shared_memory", False),)
# 1.6 MB in one bucket: over the ring, or through shared memory.
_LARGE: dict[str, Any] = {"width": 40_000, "bucket_mb": 4}

TRAINING_POINTS = [
    *(Place(point, backend) for point in ("average.packed", "average.reduced") for backend in ("prague", "dssync")),
    *(Place("subset.headers", backend, options=_SOCKETS) for backend in ("prague", "dssync")),
    Place("subset.headers", "prague", options=_SOCKETS, partial=True),
    *(Place("subset.halfway", backend, options=_SOCKETS, **_LARGE) for backend in ("prague", "dssync")),
    *(Place("window.written", backend, **_LARGE) for backend in ("prague", "dssync")),
    *(Place(point, "prague", victim=0) for point in ("generator.asked", "generator.answered")),
    *(Place(point, "hop") for point in ("hop.published", "hop.taken")),
    *(Place(point, "dear") for point in ("exchange.begun", "exchange.arrived")),
    *(Place("exact.average", backend, meets=True) for backend in ("prague", "hop", "dssync")),
]

RECOVERY_POINTS = {
    "fault_message.heard",
    *("membership.alive", "membership.listed"),
    *("group.arrived", "group.connected", "group.formed"),
    *("state_transfer.sending", "state_transfer.receiving"),
}
