"""Closures of an optimizer's step: passes that it makes itself, before it changes parameters or in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["StepBehindClosure", "closure_of", "with_closure", "with_closure_then"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step; a class of somebody's own may take something else first."""
    given = args[0] if args else kwargs.get("closure")
    return given if callable(given) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> _Arguments:
    """The arguments with another closure in the place of theirs."""
    return ((closure, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": closure})


def with_closure_then(args: tuple[Any, ...], kwargs: dict[str, Any], hook: Callable[[], None]) -> _Arguments:
    """The arguments with their closure, behind whose passes a hook is called each time."""
    closure = closure_of(args, kwargs)
    assert closure is not None

    def call() -> Any:
        loss = closure()
        hook()
        return loss

    return with_closure(args, kwargs, call)


class StepBehindClosure:
    """Begins a step behind the passes of its closure, under which what is under way hides.

    LBFGS compares the losses of several passes, between which nobody else may change parameters. A class of somebody's
    own may have moved them before it calls its closure, and put them back after it. Their steps are not put off.

    Args:
        begin: Begins a step of an optimizer.
    """

    def __init__(self, begin: Callable[[torch.optim.Optimizer], None]) -> None:
        self._begin = begin
        self._awaiting: torch.optim.Optimizer | None = None  # steps, and its closure has not been called

    def put_off(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        """What to step with, for the step to begin behind its closure; None: nothing waits for a closure.

        Args:
            optimizer: About to step.
            args: As its pre-hooks get them, the optimizer first.
            kwargs: As its pre-hooks get them.
        """
        self._awaiting = None  # of a step that ended with its closure's error
        if closure_of(args[1:], kwargs) is None or not _calls_closure_first(optimizer):
            return None
        self._awaiting = optimizer
        others, kwargs = with_closure_then(args[1:], kwargs, self.begin)
        return (optimizer, *others), kwargs

    def begin(self) -> None:
        """Begins the step that was put off, if it has not begun: a step may end without a call of its closure."""
        optimizer, self._awaiting = self._awaiting, None
        if optimizer is not None:
            with torch.no_grad():
                self._begin(optimizer)


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls a closure once, and before it does anything else: so do all of torch's but LBFGS."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS
