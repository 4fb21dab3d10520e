"""Averaged gradients that a step of the sharded form of "dear" has used up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchext.ddp.under_way import own_gradient, set_own_gradient

__all__ = ["SpentGradients"]


class SpentGradients:
    """Which averaged gradients are gone because a step has used their slices. A rank still has its own of these.

    It owns their positions, until the next pass that averages. :meth:`clear` is called on autograd's thread.

    Args:
        parameters: The model's, in registration order.
        group: Over whose ranks gradients are averaged.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group
        self._positions: set[int] = set()
        self._used: set[int] = set()  # by the step under way
        self._lost = False  # a script's change of averaged gradients, which was in slices alone

    def __contains__(self, position: int) -> bool:
        return position in self._positions

    def use(self, position: int) -> None:
        """The step under way uses the slice of this one."""
        self._used.add(position)

    def end_step(self, averaged: Collection[int], alone: bool, changed: bool) -> None:
        """What the step has used of averaged gradients is spent.

        Args:
            averaged: Positions of those that there were.
            alone: It was the step of all parameters, else that of one of several optimizers.
            changed: A script had changed some.
        """
        used, self._used = self._used.intersection(averaged), set()
        self._positions = used if alone else self._positions | used
        self._lost = self._lost or changed

    def discard(self, positions: Iterable[int]) -> set[int]:
        """Forgets these; returns those of them that there were."""
        found = self._positions.intersection(positions)
        self._positions -= found
        return found

    def clear(self) -> None:
        """A backward pass has averaged anew."""
        self._positions.clear()
        self._lost = False

    def restore(self) -> None:
        """Makes of them what plain DDP leaves: their averages. Collective.

        Where a script has changed them before the step, the change was in the slices, and there are none instead.
        """
        flags = torch.zeros(len(self._parameters) + 1, dtype=torch.uint8, device="cpu")
        flags[list(self._positions)] = 1
        flags[-1] = not self._lost  # ranks must not decide differently: a script may have changed one rank's alone
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._group)
        *spent, unchanged = flags.tolist()
        for parameter in (parameter for parameter, flag in zip(self._parameters, spent, strict=True) if flag):
            own = own_gradient(parameter)
            if not unchanged:
                set_own_gradient(parameter, None)
                continue
            average = torch.zeros_like(parameter, requires_grad=False) if own is None else own.detach().clone()
            average /= self._group.size()
            dist.all_reduce(average, group=self._group)
            set_own_gradient(parameter, average)
        self._positions.clear()
