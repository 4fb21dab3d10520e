"""``optimizer.step()`` of the replicated form of "dear": remembered, and done when the next forward needs it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchext._dear_parameter import SteppedParameter
from torchext._dear_refusals import ELEMENTWISE
from torchext._dear_state import groups_of
from torchext._step_hooks import unhooked_step
from torchext._uncompiled import STEP_IS_EAGER, uncompiled

__all__ = ["DeferredStep"]

# Optimizers that step each parameter by itself; others step all of them at once, when the first one is needed.
_ONE_BY_ONE = (
    *ELEMENTWISE,
    *(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)),
)

_OF_SCALER = ("grad_scale", "found_inf")


class DeferredStep:
    """Replaces ``optimizer.step`` on one optimizer.

    A call keeps the hyperparameters of that moment (a scheduler may change them before the step is done) and runs the
    hooks of the optimizer; :meth:`apply` does the step for some parameters, and :meth:`finish` for all that are left.

    Args:
        optimizer: Holds SteppedParameters.
        has_gradients: Asked when the step is called, and its closure has run; False: they are all None.
        inside: Entered while the step is done, or a part of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        has_gradients: Callable[[], bool],
        inside: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._optimizer, self._has_gradients, self._inside = optimizer, has_gradients, inside
        self._groups: list[dict[str, Any]] = []  # as they were, for the step under way
        self._left: dict[int, SteppedParameter] = {}  # by position: not stepped yet
        self._one_by_one = type(optimizer) in _ONE_BY_ONE
        self._scaler: dict[str, torch.Tensor | None] = {}  # what a GradScaler has told a fused optimizer, for that step
        # Hooks have run; a compiled forward pass that comes here must not compile the step with it.
        self._step = torch.compiler.disable(_in_no_mode(unhooked_step(optimizer)))  # type: ignore[no-untyped-call]
        self._before = optimizer.__dict__.get("step")
        remember = uncompiled(STEP_IS_EAGER)(torch.optim.Optimizer.profile_hook_step(_Remember(self)))
        optimizer.step = types.MethodType(remember, optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Gives the optimizer its own step back; what has not been finished of the last one is not done."""
        if self._before is not None:
            self._optimizer.step = self._before  # type: ignore[method-assign]
        else:
            self._optimizer.__dict__.pop("step", None)

    def apply(self, positions: Iterable[int]) -> None:
        """Does the step for the parameters at these positions, where that has not been done."""
        if not self._left:
            return
        if not self._one_by_one:
            self.finish()
            return
        wanted = {position for position in positions if position in self._left}
        if wanted:
            self._run(wanted)

    def finish(self) -> None:
        """Does what is left of the step."""
        if self._left:
            self._run(set(self._left))

    def remember(self, closure: Callable[[], Any] | None) -> Any:
        """What ``optimizer.step(closure)`` does, once the last one is finished."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        there = self._has_gradients()
        optimizer = self._optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        self._groups = [{key: _kept(value) for key, value in group.items()} for group in optimizer.param_groups]
        # The scaler takes them back when step() returns, and changes the scale in place.
        self._scaler = {name: _kept(getattr(optimizer, name)) for name in _OF_SCALER if hasattr(optimizer, name)}
        self._left = {
            p.position: p
            for group in optimizer.param_groups
            for p in group["params"]
            if isinstance(p, SteppedParameter) and not (there and p.dropped)
        }
        if not there:
            self.finish()
        return loss

    def _run(self, positions: set[int]) -> None:
        for position in positions:
            del self._left[position]
        optimizer = self._optimizer
        groups = optimizer.param_groups
        chosen = groups_of(self._groups, positions)
        optimizer.param_groups = [group for group in chosen if group["params"]] if self._one_by_one else chosen
        attributes = optimizer.__dict__
        now = {name: attributes.pop(name) for name in _OF_SCALER if name in attributes}  # for the step after this one
        attributes.update(self._scaler)
        try:
            with self._inside():
                self._step(optimizer)
        finally:
            optimizer.param_groups = groups
            for name in self._scaler:
                del attributes[name]
            attributes.update(now)
        if not self._one_by_one:
            # What the step itself has changed, a counter say; what others have changed since, stays.
            for group, before, after in zip(groups, self._groups, chosen, strict=True):
                group.update({k: v for k, v in after.items() if k != "params" and v is not before.get(k)})


class _Remember:
    """The function that the optimizer's hooks are wrapped around."""

    __name__ = "step"

    def __init__(self, deferred: DeferredStep) -> None:
        self._deferred = deferred

    def __call__(self, _: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return self._deferred.remember(closure)


def _in_no_mode(step: Callable[..., Any]) -> Callable[[torch.optim.Optimizer], None]:
    """The step, out of the modes that a forward pass may be in; without gradients, as all steps."""

    def alone(optimizer: torch.optim.Optimizer) -> None:
        devices = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))  # first: it turns gradients on
            modes.enter_context(torch.no_grad())
            for device in devices:
                modes.enter_context(torch.autocast(device, enabled=False))
            step(optimizer)

    return alone


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
