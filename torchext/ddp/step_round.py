"""The steps of a model's optimizers, of which each makes its part, as one step of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["StepRound"]


class StepRound:
    """Tells when a step of a model begins and when it is over.

    It begins with the first of its optimizers' steps and is over with the last. An optimizer may be left out
    (``GradScaler`` does so when it finds an overflow, other scripts take turns): then the step is over when another one
    steps for the second time, and wherever :meth:`close` is called.

    Args:
        optimizers: The model's.
        begin: Called when a step begins.
        end: Called when it is over.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._begin, self._end = begin, end
        self._all = {id(optimizer) for optimizer in optimizers}
        self._made: set[int] = set()  # those that have made their part
        self._making: int | None = None
        self._open = False

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if id(optimizer) in self._made:
            self.close()
        # Where it has begun before, an error has ended that step.
        if not self._open or self._making == id(optimizer):
            self._begin()
            self._open = True
        self._making = id(optimizer)

    def ends(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        self._making = None
        self._made.add(id(optimizer))
        if self._made == self._all:
            self.close()

    @property
    def is_partial(self) -> bool:
        """Whether some have stepped, and others are still to."""
        return self._open and bool(self._made)

    def close(self) -> None:
        """Whoever has not stepped is left out. Nothing where no optimizer has."""
        if not self.is_partial:
            return
        self._open = False
        self._made.clear()
        self._end()
