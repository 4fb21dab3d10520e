"""Averaged gradients in the replicated form of "dear"."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchext.ddp.under_way import own_gradient, set_own_gradient
from torchext.dear.averaged_gradients import AveragedGradients
from torchext.dear.sliced_gradient import SlicedGradient

__all__ = ["ReplicatedGradients"]


class ReplicatedGradients(AveragedGradients):
    """Whole averaged gradients on their way: one is waited for when somebody looks, and is the parameter's own then."""

    def before_use(self, positions: Iterable[int]) -> None:
        for position in positions:
            if position in self:
                self._settle(position)  # a pass that begins would add to it

    def before_pass(self) -> None:
        self.settle_all()  # or a rank without one would add nothing to what it is

    def settle_all(self) -> None:
        for position in list(self._positions):
            self._settle(position)

    def forget_spent(self, positions: Iterable[int]) -> None:
        pass  # behind a step the averaged gradient is the parameter's own

    def gradient(self, position: int) -> torch.Tensor | None:
        self._settle(position)
        return own_gradient(self._parameters[position])

    def replace(self, position: int, value: torch.Tensor | None) -> None:
        if isinstance(value, SlicedGradient):  # another model's
            value = value.clone()
        self._settle(position)
        set_own_gradient(self._parameters[position], value)

    def _settle(self, position: int) -> None:
        self._core.settle_gradient(position)
        self.drop([position])

    def _zero(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        set_own_gradient(parameter, torch.zeros_like(gradient))  # the step may still need the old one
