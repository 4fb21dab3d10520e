"""Averaged gradients of "dear" stand in the place of parameters' own, from an averaging backward pass to the step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from torchext import _C
from torchext.ddp.under_way import own_gradient, set_own_gradient

__all__ = ["AveragedGradients"]


class AveragedGradients(abc.ABC):
    """Averaged gradients that are not the parameters' own.

    It owns which parameters have one that no step has used and no script has replaced. The form says what it is:
    :class:`ReplicatedGradients`, :class:`ShardedGradients`. :meth:`renew` is called on autograd's thread.

    Args:
        core: The C++ synchronizer.
        parameters: The model's, in registration order.
        released: Is told the positions of parameters whose ``.grad`` may be their own again.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        parameters: Sequence[nn.Parameter],
        released: Callable[[Iterable[int]], None],
    ) -> None:
        self._core, self._parameters, self._released = core, parameters, released
        self._positions: set[int] = set()

    def __contains__(self, position: int) -> bool:
        """Whether there is an averaged gradient to step with that is not the parameter's own."""
        return position in self._positions

    def stands_in(self, position: int) -> bool:
        """Whether ``parameter.grad`` is another than the parameter's own."""
        return position in self._positions

    def renew(self, positions: Iterable[int]) -> None:
        """A backward pass has averaged these."""
        self.drop()  # of an earlier pass
        self._positions = set(positions)

    def drop(self, positions: Iterable[int] | None = None) -> None:
        """What has been averaged counts no more, or has been used; the parameters' own gradients are what they are."""
        dropped = list(self._positions) if positions is None else list(positions)
        self._positions.difference_update(dropped)
        self._released(dropped)

    def clear(self, set_to_none: bool, positions: Iterable[int] | None = None) -> None:
        """What ``zero_grad()`` does to these or to all, without waiting for a step that is under way."""
        cleared = range(len(self._parameters)) if positions is None else list(positions)
        self.drop(cleared)
        self.forget_spent(cleared)
        if not self._positions:
            self._core.clear_gradients()
        for parameter in map(self._parameters.__getitem__, cleared):
            gradient = own_gradient(parameter)
            if gradient is not None and set_to_none:
                set_own_gradient(parameter, None)
            elif gradient is not None:
                self._zero(parameter, gradient)

    def restore(self) -> None:
        """Makes gradients what plain DDP leaves. Collective when sharded."""
        self.settle_all()

    @abc.abstractmethod
    def before_use(self, positions: Iterable[int]) -> None:
        """The values of these parameters are about to be used, by a pass perhaps."""

    @abc.abstractmethod
    def forget_spent(self, positions: Iterable[int]) -> None:
        """Where a step has used up averaged gradients of these, the parameters' own count again."""

    @abc.abstractmethod
    def before_pass(self) -> None:
        """A forward pass begins whose backward pass may add to gradients that no step has used."""

    @abc.abstractmethod
    def settle_all(self) -> None:
        """Makes averaged gradients that no optimizer has stepped with the parameters' own. Collective when sharded."""

    @abc.abstractmethod
    def gradient(self, position: int) -> torch.Tensor | None:
        """What ``parameter.grad`` is to give, where something stands in."""

    @abc.abstractmethod
    def replace(self, position: int, value: torch.Tensor | None) -> None:
        """What ``parameter.grad = value`` is to do there."""

    @abc.abstractmethod
    def _zero(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Makes a parameter's own gradient zeros."""
