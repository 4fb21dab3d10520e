"""K-FAC before an optimizer's step: the hook in front of ``optimizer.step()``, closures, gradient scalers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from torchext.ddp.step_hooks import before_step

if TYPE_CHECKING:
    from torchext.optim.preconditioner import KFACPreconditioner

__all__ = ["Handle", "hook_before_step", "remove_all", "step_before", "stepped_by"]


class Handle(Protocol):
    """What takes away a hook, or something like it."""

    def remove(self) -> None:
        """Takes it away."""


def remove_all(handles: list[Handle]) -> None:
    """Removes each of them."""
    for handle in handles:
        handle.remove()


class _TakesScale:
    """Makes a GradScaler hand over its scale and what it found, and leave the gradients alone, until it is removed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._before = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._set(True)

    def _set(self, value: bool) -> None:
        optimizer: Any = self._optimizer()
        if optimizer is not None:
            optimizer._step_supports_amp_scaling = value

    def remove(self) -> None:
        self._set(self._before)


def hook_before_step(optimizer: torch.optim.Optimizer, kfac: KFACPreconditioner) -> list[Handle]:
    """Has ``optimizer.step()`` precondition first; with a closure, after that.

    The optimizer then keeps ``kfac`` alive. The handles, which do not, take it away from there.
    """

    def precondition(used: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            _precondition(kfac, used)
            return None
        then = _after(closure, kfac, used)  # there are no gradients yet
        return ((args[0], then, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then})

    return [before_step(optimizer, precondition), _TakesScale(optimizer)]


def _after(closure: Callable[[], Any], kfac: KFACPreconditioner, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    calls = 0

    def then() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                f"{type(optimizer).__name__} calls its closure more than once a step, K-FAC takes one gradient a "
                "step; use an optimizer that calls it once"
            )
        loss = closure()
        _precondition(kfac, optimizer)
        return loss

    return then


def _precondition(kfac: KFACPreconditioner, optimizer: Any) -> None:
    if not step_before(optimizer, kfac):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # what every optimizer leaves alone
    if getattr(optimizer, "found_inf", None) is not None:
        optimizer.grad_scale = optimizer.found_inf = None  # both are seen to; the scaler deletes them


def step_before(optimizer: Any, kfac: KFACPreconditioner) -> bool:
    """``kfac.step()`` before this optimizer's, with what a GradScaler has told it."""
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    if found_inf is not None and grad_scale is None and kfac._grad_scaler is None:
        raise RuntimeError(
            "the GradScaler has unscaled the gradients before step(), so that its scale is no longer known here; "
            f"pass grad_scaler=scaler to {'the optimizer' if hasattr(optimizer, 'kfac') else type(kfac).__name__}"
        )
    return kfac.step(
        optimizer.param_groups,
        loss_scale=None if grad_scale is None else float(grad_scale),
        unscale=grad_scale is not None,
        found_inf=found_inf is not None and float(found_inf) > 0,
    )


def stepped_by(optimizer: torch.optim.Optimizer | None) -> set[int] | None:
    """Ids of the model's parameters that it steps; None: it is not known."""
    groups = getattr(optimizer, "param_groups", None)  # which one that could not be built has not
    return None if groups is None else {id(p) for group in groups for p in group["params"]}
