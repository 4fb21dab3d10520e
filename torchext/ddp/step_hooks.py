"""Hooks around an optimizer's step that run once a step, whatever the optimizer's class.

torch wraps ``step`` of every class that was made an instance of, and each wrapper runs all hooks. Where a subclass's
``step()`` calls ``super().step()`` they run for both, if the parent was ever made an instance of, too: gradients would
be preconditioned twice, and models averaged before the subclass has ended its step. For optimizers of such a class the
calls inside ``optimizer.step`` are counted, and the outermost one runs the hook.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["after_step", "before_step", "unhooked", "unhooked_step"]

Hook = Callable[[torch.optim.Optimizer, Any, Any], Any]


def before_step(optimizer: torch.optim.Optimizer, hook: Hook) -> RemovableHandle:
    """As ``register_step_pre_hook``, for the outermost of nested calls of ``step()``."""
    return optimizer.register_step_pre_hook(_outermost(optimizer, hook))


def after_step(optimizer: torch.optim.Optimizer, hook: Hook) -> RemovableHandle:
    """As ``register_step_post_hook``, for the outermost of nested calls of ``step()``."""
    return optimizer.register_step_post_hook(_outermost(optimizer, hook))


@contextlib.contextmanager
def unhooked(optimizer: Any) -> Iterator[None]:
    """Inside, a step of the optimizer runs none of its own hooks."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, to call with it, without its hooks: those of its parents' steps neither."""
    wrapped = type(optimizer).step
    step = getattr(wrapped, "__wrapped__", wrapped)

    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with unhooked(optimizer):
            return step(optimizer, *args, **kwargs)

    return call


class _Calls:
    """How many steps of its class and of its parents an optimizer is in."""

    depth = 0


_calls: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Calls] = weakref.WeakKeyDictionary()


def _outermost(optimizer: torch.optim.Optimizer, hook: Hook) -> Hook:
    if sum("step" in vars(kind) for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer) < 2:
        return hook
    calls = _calls.get(optimizer) or _count_calls(optimizer)

    def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return hook(optimizer, args, kwargs) if calls.depth == 1 else None

    return call


def _count_calls(optimizer: torch.optim.Optimizer) -> _Calls:
    _watch_steps()
    calls = _calls[optimizer] = _Calls()
    function = optimizer.step

    @functools.wraps(function)
    def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        calls.depth = 0  # an error may have ended the last one
        return function(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return calls


@functools.cache
def _watch_steps() -> None:  # where there is something to count: before all hooks of a step, and after all
    register_optimizer_step_pre_hook(functools.partial(_add, 1))
    register_optimizer_step_post_hook(functools.partial(_add, -1))


def _add(number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    calls = _calls.get(optimizer)
    if calls is not None:
        calls.depth += number
