"""Measured steps of a script that trains by a plan, beside the predicted ones."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from torchext.auto.all_ranks import check_same, errors_on_all, gathered
from torchext.auto.candidates import Candidate
from torchext.auto.explanation import described
from torchext.auto.step_watch import watch_of
from torchext.auto.sync_plan import SyncPlan
from torchext.base.plain import plain
from torchext.ddp.synchronizer import Synchronizer

__all__ = ["Verification", "verify"]

_CALLER = "torchext.auto.verify"
_MOST_STEPS = 1000


@dataclass(frozen=True)
class Verification:
    """A predicted step and a measured one.

    Args:
        way: By which the model trains, in words.
        predicted_ms: Of a step, with the work of the plainest optimizer.
        measured_ms: The median of the last steps, on the slowest rank.
        steps: How many were looked at.
    """

    way: str
    predicted_ms: float
    measured_ms: float
    steps: int

    @property
    def ratio(self) -> float:
        """Measured over predicted: above 1 steps take longer than predicted."""
        return self.measured_ms / self.predicted_ms


def verify(plan: SyncPlan, sync: Synchronizer, steps: int = 20) -> Verification:
    """Compares the predicted step with the last steps that the script has taken. Collective.

    Nothing is run and nothing changes: ``apply`` has noted when each step of the optimizer ended. So what is measured
    is the script's own step, with the reading of data and all of the optimizer's work. The prediction has plain SGD's.
    Call it after ``steps`` steps and one more; with ``dear`` after 80, when it is decided that the plan's buckets stay.

    Args:
        plan: That was applied.
        sync: What ``plan.apply`` has returned.
        steps: How many of the last steps count, 1 to 1000.

    Returns:
        Predicted and measured milliseconds, the same on all ranks.

    Raises:
        TypeError: ``plan`` or ``sync`` is something else.
        ValueError: ``steps`` is out of range or differs between ranks, or the plan is for one rank.
        RuntimeError: ``sync`` is not of a model that trains by a plan, too few steps have been taken, or ``dear`` has
            not decided yet.
    """
    if not isinstance(plan, SyncPlan):
        raise TypeError(f"{_CALLER}: plan must be a torchext.auto.SyncPlan, got {type(plan).__name__}")
    if not isinstance(sync, Synchronizer):
        raise TypeError(f"{_CALLER}: sync must be what plan.apply returns, got {type(sync).__name__}")
    steps = plain(steps)
    if plan.chosen is None:
        raise ValueError(f"{_CALLER}: the plan is for one rank, which has nothing to synchronise")
    group = sync._ddp.process_group
    with errors_on_all(_CALLER, group):
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MOST_STEPS:
            raise ValueError(f"{_CALLER}: steps must be a whole number from 1 to {_MOST_STEPS}, got {steps!r}")
        median = _median(sync, steps)
    check_same(_CALLER, group, {"steps": steps})
    candidate = _used(plan, sync)
    return Verification(
        way=described(plan.profile, candidate),
        predicted_ms=1e3 * candidate.step_seconds,
        measured_ms=1e3 * max(gathered(group, median)),
        steps=steps,
    )


def _median(sync: Synchronizer, steps: int) -> float:
    watch = watch_of(sync)
    if watch is None:
        raise RuntimeError(f"{_CALLER}: sync is not what plan.apply has returned; apply a plan, and train by it")
    if not sync.stats().get("decided", True):
        raise RuntimeError(
            f"{_CALLER}: dear still compares the plan's buckets with plain all-reduce; train on, and ask again"
        )
    last = watch.last(steps)
    if len(last) < steps:
        raise RuntimeError(
            f"{_CALLER}: {len(last)} steps have been timed, and steps is {steps}; train on, and ask again"
        )
    return statistics.median(last)


def _used(plan: SyncPlan, sync: Synchronizer) -> Candidate:
    """What the model trains by now: with dear it may be plain all-reduce in the end."""
    chosen = plan.chosen
    assert chosen is not None  # of several ranks one is
    if chosen.way == "dear" and sync.stats()["mode"] == "allreduce":
        return next(c for c in plan.candidates if (c.way, c.form) == ("ddp", "default"))
    return chosen
