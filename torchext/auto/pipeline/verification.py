"""Compares a plan's prediction with steps that ran."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from torchext.auto.all_ranks import gathered
from torchext.auto.pipeline.pipeline_plan import PipelinePlan
from torchext.base.plain import plain

__all__ = ["Verification", "verify"]

_CALLER = "torchext.auto.pipeline.verify"


@dataclass(frozen=True)
class Verification:
    """Predicted beside measured.

    Args:
        predicted: Seconds of a step, by the plan.
        measured: Seconds of the median step; of each step the slowest rank counts.
        steps: Seconds of each.
    """

    predicted: float
    measured: float
    steps: tuple[float, ...]

    @property
    def error(self) -> float:
        """How much less was predicted than measured, as a share: -0.02 is 2 % less."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        return (
            f"predicted {1e3 * self.predicted:.4g} ms a step, measured {1e3 * self.measured:.4g} "
            f"({min(self.steps) * 1e3:.4g} to {max(self.steps) * 1e3:.4g}): {100 * self.error:+.1f} %"
        )


def verify(plan: PipelinePlan, schedule_step: Callable[[], object], steps: int = 5) -> Verification:
    """Runs some steps, and compares their time with the plan's. Collective over the default group.

    Args:
        plan: What ``schedule_step`` runs.
        schedule_step: Runs one step on this rank, without the optimizer: ``lambda: schedule.step(x)``.
        steps: How many are measured; one runs before them.

    Returns:
        The same on all ranks.

    Raises:
        TypeError: ``schedule_step`` is not callable.
        ValueError: ``steps`` is out of range.
    """
    steps = plain(steps)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 1000:
        raise ValueError(f"{_CALLER}: steps must be a whole number from 1 to 1000, got {steps!r}")
    if not callable(schedule_step):
        raise TypeError(
            f"{_CALLER}: schedule_step must be callable, got {type(schedule_step).__name__}; pass a function that runs "
            "a step on this rank"
        )
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    own = []
    for _ in range(steps + 1):
        if group is not None:
            dist.barrier(group)
        begin = time.perf_counter()
        schedule_step()
        own.append(time.perf_counter() - begin)
    every = [own] if group is None else gathered(group, own)
    slowest = tuple(map(max, zip(*every, strict=True)))[1:]
    predicted = plan.predict().seconds
    return Verification(predicted, statistics.median(slowest), slowest)
