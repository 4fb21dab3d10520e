"""Hooks into the optimizers of a model that is averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchext.ddp.forward_hooks import Hook
from torchext.ddp.step_closures import StepBehindClosure
from torchext.ddp.step_hooks import after_step, before_step
from torchext.ddp.step_round import StepRound
from torchext.decentralized.reassigned_buffers import ReassignedBuffers

__all__ = ["ModelSteps"]


class ModelSteps:
    """Tells when a step of a model begins and when it is over (``step_round.py``), until removed.

    A step with a closure begins behind the passes of that. Buffers that were assigned anew are put back before a step
    begins, and before it is over.

    Args:
        model: With several optimizers, its forward pass ends a step that one of them has no part in.
        optimizers: The model's.
        buffers: The model's.
        check: Raises where a step is refused.
        begin: Called when a step begins.
        end: Called when it is over.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        buffers: ReassignedBuffers,
        check: Callable[[], None],
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._buffers, self._check = buffers, check
        self._round = StepRound(optimizers, begin, end)
        self._behind_closure = StepBehindClosure(self._begin)
        self.inside = False
        """An optimizer's step is under way."""
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles += [before_step(optimizer, self._before), after_step(optimizer, self._after)]
        if len(optimizers) > 1:
            self._handles.append(model.register_forward_pre_hook(Hook(self._enter_forward), prepend=True))

    def close(self) -> None:
        """Ends a step in which some optimizers have stepped: the others are left out."""
        self._round.close()

    def remove(self) -> None:
        """Takes the hooks back."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.inside = True
        put_off = self._behind_closure.put_off(optimizer, args, kwargs)
        if put_off is None:
            self._begin(optimizer)
        else:
            self._check()
        return put_off

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._buffers.restore()
        self._check()
        self._round.begins(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._behind_closure.begin()  # an optimizer that did not call its closure
        self._buffers.restore()
        self._round.ends(optimizer)
        self.inside = False

    def _enter_forward(self) -> None:
        if torch.is_grad_enabled():
            self._round.close()
