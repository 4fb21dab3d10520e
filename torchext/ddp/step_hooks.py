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

__all__ = [
    *("after_step", "before_step", "calls_closure_first", "closure_of", "unhooked", "unhooked_step", "with_closure"),
]

Hook = Callable[[torch.optim.Optimizer, Any, Any], Any]


def before_step(optimizer: torch.optim.Optimizer, hook: Hook) -> RemovableHandle:
    """As ``register_step_pre_hook``, for the outermost of nested calls of ``step()``."""
    return optimizer.register_step_pre_hook(_outermost(optimizer, hook))


def after_step(optimizer: torch.optim.Optimizer, hook: Hook) -> RemovableHandle:
    """As ``register_step_post_hook``, for the outermost of nested calls of ``step()``."""
    return optimizer.register_step_post_hook(_outermost(optimizer, hook))


def calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls a closure once, and before it does anything else: so do all of torch's but LBFGS."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step; a class of somebody's own may take something else first."""
    given = args[0] if args else kwargs.get("closure")
    return given if callable(given) else None


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another closure in the place of theirs."""
    return ((closure, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": closure})


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
