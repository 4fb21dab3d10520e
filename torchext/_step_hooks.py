"""Hooks around an optimizer's step that run once a step, whatever the optimizer's class.

torch wraps ``step`` of every class that was made an instance of, and each wrapper runs all hooks. Where a subclass's
``step()`` calls ``super().step()`` they run for both, if the parent was ever made an instance of, too: gradients would
be preconditioned twice, and models averaged before the subclass has ended its step.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["after_step", "before_step", "unhooked_step"]

Hook = Callable[[torch.optim.Optimizer, Any, Any], Any]

_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def before_step(optimizer: torch.optim.Optimizer, hook: Hook) -> RemovableHandle:
    """As ``register_step_pre_hook``, for the outermost of nested calls of ``step()``."""
    return optimizer.register_step_pre_hook(_outermost(hook))


def after_step(optimizer: torch.optim.Optimizer, hook: Hook) -> RemovableHandle:
    """As ``register_step_post_hook``, for the outermost of nested calls of ``step()``."""
    return optimizer.register_step_post_hook(_outermost(hook))


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The optimizer's ``step``, to call with it, without the hooks of its own: those of its parents' steps neither."""
    wrapped = type(optimizer).step
    step = getattr(wrapped, "__wrapped__", wrapped)

    def call(optimizer: Any) -> Any:
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            return step(optimizer)
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks

    return call


def _outermost(hook: Hook) -> Hook:
    def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if _nested(optimizer) else hook(optimizer, args, kwargs)

    return call


def _nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's ``step()`` was called by its ``step()``. Counts nothing that an error could leave."""
    wrappers = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and wrappers < 2:
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            wrappers += 1
        frame = frame.f_back
    return wrappers == 2
