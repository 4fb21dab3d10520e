"""A step watch compares the steps of a script that trains by a plan with what was predicted."""

from __future__ import annotations

import collections
import logging
import statistics
import time
import weakref
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from torchext.base.eager_only import eager_only
from torchext.ddp.synchronizer import Synchronizer

__all__ = ["StepWatch", "watch_of"]

_WINDOW = 50  # steps of which the median is taken
_KEPT = 1000  # steps
_TOO_LONG = 1.25  # times the predicted step
# What a plan of dear's takes to decide, and what links and allocators take to warm up.
_NOT_LOOKED_AT = 100
_logger = logging.getLogger("torchext")
_watches: weakref.WeakKeyDictionary[Synchronizer, StepWatch] = weakref.WeakKeyDictionary()


def watch_of(synchronizer: Synchronizer) -> StepWatch | None:
    """The watch over a synchronizer's steps; None where no plan was applied."""
    return _watches.get(synchronizer)


class StepWatch:
    """Takes the times between an optimizer's steps, and says once if they are much longer than predicted.

    It costs a look at the clock in each step. A pause between two steps, as for an evaluation, moves no median.

    Args:
        synchronizer: Of the model.
        optimizer: The one whose steps count.
        predicted_seconds: Of a step.
        speaks: Whether this rank is the one that says it.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        optimizer: torch.optim.Optimizer,
        predicted_seconds: float,
        *,
        speaks: bool,
    ) -> None:
        self.seconds: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._predicted, self._speaks = predicted_seconds, speaks
        self._before: float | None = None
        self._counted = 0
        self._handle = _hook(self, optimizer)
        _watches[synchronizer] = self

    def note(self) -> None:
        """A step is over."""
        now = time.perf_counter()
        if self._before is not None:
            self.seconds.append(now - self._before)
            self._counted += 1
        self._before = now
        if self._speaks and self._counted > _NOT_LOOKED_AT and self._counted % _WINDOW == 0:
            self._look()

    def last(self, steps: int) -> list[float]:
        """Seconds of the last so many steps, or of fewer."""
        return list(self.seconds)[-steps:]

    def _look(self) -> None:
        measured = statistics.median(self.last(_WINDOW))
        if measured > _TOO_LONG * self._predicted:
            self._speaks = False
            _logger.warning(
                "torchext.auto: a step takes %.4g ms (median of %d), and the plan predicted %.4g ms; "
                "torchext.auto.plan measures network and model anew",
                1e3 * measured,
                _WINDOW,
                1e3 * self._predicted,
            )


def _hook(watch: StepWatch, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Has the watch note the optimizer's steps while somebody holds it."""
    reference = weakref.ref(watch)

    @eager_only("torchext.auto: an optimizer's step is timed")
    def note(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.note()

    handle: RemovableHandle = optimizer.register_step_post_hook(note)
    weakref.finalize(watch, handle.remove).atexit = False
    return handle
