"""``optimizer.step()`` and ``optimizer.zero_grad()`` of an optimizer whose model is trained by "dear"."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from torchext import _C
from torchext.base.eager_only import STEP_IS_EAGER, eager_only
from torchext.ddp.step_closures import closure_of, with_closure, with_closure_then
from torchext.ddp.step_hooks import unhooked, unhooked_step
from torchext.dear.dear_parameters import DearParameters
from torchext.dear.dear_refusals import ONE_BY_ONE, refuse_copies
from torchext.dear.dear_state import DearState
from torchext.dear.deferred_step import DeferredStep
from torchext.dear.optimizer_state import groups_of
from torchext.dear.sharded_gradients import ShardedGradients

__all__ = ["DearStep"]

# A step is cut into so many parts at most: each of them goes through the param groups.
_PARTS = 16


class DearStep:
    """Takes the place of an optimizer's ``step`` and ``zero_grad``, until removed.

    The optimizer's hooks are called around it, once. Inside, the class's own step is done: on the model's parameters
    while DDP's reducer averages; on this rank's slices in the sharded form; later in the replicated form.

    That is so for classes of ``torch.optim``. Of others nobody knows when they call their closure, what else they are
    given, what they return and what they keep beside their state: they step at once, but for the sharded form's slices.

    Args:
        core: The C++ synchronizer.
        optimizer: In the sharded form an elementwise one.
        parameters: The model's.
        state: The optimizer's.
        deferred: Does the step of the replicated form.
        own: The positions of the parameters that are the optimizer's; None: all.
        begins: Called before it, behind the closure.
        ends: Called after it, before the optimizer's hooks are.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        optimizer: torch.optim.Optimizer,
        parameters: DearParameters,
        state: DearState,
        deferred: DeferredStep,
        own: Callable[[], Collection[int] | None],
        begins: Callable[[], None],
        ends: Callable[[], None],
    ) -> None:
        self._core, self._optimizer, self._parameters, self._state = core, optimizer, parameters, state
        self._deferred, self._own, self._begins, self._ends = deferred, own, begins, ends
        self._step = unhooked_step(optimizer)
        self.under_way = False
        self._versions: list[int] = []  # of slices, when they were about to be stepped
        attributes = optimizer.__dict__
        # Somebody's own, a scheduler's say, which only counts; another may do more than the class's.
        self._before = {name: attributes[name] for name in _REPLACED if name in attributes}
        before = self._before.get("step")
        counted = hasattr(before, "_wrapped_by_lr_sched")
        self._own_step = None if before is None or counted else before
        self._known = type(optimizer) in ONE_BY_ONE and self._own_step is None
        # One that is not torch's does more than clear gradients, and is called after these have been cleared.
        own_class = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        self._cleared = optimizer.zero_grad if own_class or "zero_grad" in self._before else None

        @functools.wraps(type(optimizer).step)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._do(args, kwargs)

        hooked: Any = eager_only(STEP_IS_EAGER)(torch.optim.Optimizer.profile_hook_step(_with_name(step)))
        if counted:  # or the scheduler that was made before takes this for a step that it cannot count, and warns
            hooked._wrapped_by_lr_sched = True
        optimizer.step = self._now = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        attributes["__deepcopy__"] = attributes["__reduce_ex__"] = refuse_copies

    def remove(self) -> None:
        """Gives the optimizer its own methods back; a step that was put around this one goes on calling its class's."""
        attributes = self._optimizer.__dict__
        if attributes.get("step") is not self._now:
            self._do = self._plainly  # type: ignore[method-assign]
        for name in _REPLACED:
            if name == "step" and attributes.get(name) is not self._now:
                continue
            attributes.pop(name, None)
            if name in self._before:
                attributes[name] = self._before[name]

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._step(self._optimizer, *args, **kwargs)

    def _do(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._known and (self._core.allreduce or not self._state.sharded):
            return self._do_at_once(args, kwargs)
        loss, closure = None, closure_of(args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = with_closure(args, kwargs, lambda: self._passed(loss))
        with self._inside():
            self._begins()
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
            if self._core.allreduce:
                self._run(args, kwargs)
            elif self._state.sharded:
                self._step_slices(args, kwargs)
            else:
                self._deferred.remember()
            self._ends()
        return loss

    def _passed(self, loss: Any) -> Any:
        """What a closure gives whose passes have been made before the step."""
        if self._state.sharded and not self._core.allreduce and self._state.parts.versions() != self._versions:
            raise RuntimeError(
                f"dear: {type(self._optimizer).__name__}.step() calls its closure when it has moved parameters, of "
                "which each rank has a slice in the sharded form; take DeAROptions(form='replicated')"
            )
        return loss

    def _do_at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step, on the parameters and with whole gradients; passes of its closure are a part of it."""
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True
            self._begins()
            if not self._core.allreduce:
                self._parameters.averaged.settle_all()

        with self._inside():
            if closure_of(args, kwargs) is None:
                begin()
            else:  # behind it: what was there before may be gradients of no_sync(), to which the closure has added
                args, kwargs = with_closure_then(args, kwargs, begin)
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            result = self._run(args, kwargs)
            if not begun:  # it has not called its closure
                begin()
            self._ends()
        return result

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self.under_way = True
        try:
            yield
        finally:
            self.under_way = False

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._own_step is None:
            return self._step(self._optimizer, *args, **kwargs)
        with unhooked(self._optimizer):
            return self._own_step(*args, **kwargs)

    def _step_slices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Steps what has arrived while the rest is on its way.

        Otherwise the link would be idle while everything is stepped, between the last reduce-scatter and the first
        all-gather.
        """
        optimizer, averaged = self._optimizer, self._parameters.averaged
        assert isinstance(averaged, ShardedGradients)
        in_parts = self._known
        with self._state.parts.in_param_groups() as position_of:
            groups = optimizer.param_groups
            held = [position_of(part) for group in groups for part in group["params"]]
            left = {position for position in held if position is not None}
            known, total = 0, self._core.bucket_count if in_parts else 0
            stride = max(1, -(-total // _PARTS))
            while (arrived := self._core.arrived_buckets(known + stride - 1) if total else 0) < total:
                early = {
                    position
                    for position in left
                    if position in averaged
                    and (bucket := self._core.bucket_of(position)) is not None
                    and known <= bucket < arrived
                }
                if early:
                    self._step_of(averaged, early, groups_of(groups, early, position_of), args, kwargs)
                    left -= early
                known = arrived
            # Without those that have been stepped, but what is no parameter of the model.
            stepped = {position for position in held if position is not None} - left
            rest = [{**g, "params": [p for p in g["params"] if position_of(p) not in stepped]} for g in groups]
            self._step_of(averaged, left, rest if stepped else groups, args, kwargs)
        averaged.spend(self._own())

    def _step_of(
        self,
        averaged: ShardedGradients,
        positions: set[int],
        groups: list[dict[str, Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        for position in positions:
            self._state.parts[position].grad = averaged.own_slice(position)
        optimizer, whole = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = groups
        self._versions = self._state.parts.versions()  # the parts before this one have moved theirs
        try:
            self._run(args, kwargs)
        finally:
            optimizer.param_groups = whole

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._parameters.averaged.clear(set_to_none, self._own())
        if set_to_none:
            self._deferred.cleared()
        if self._cleared is not None:
            with self._parameters.raw_gradients():
                self._cleared(**({} if set_to_none else {"set_to_none": False}))


_REPLACED = ("step", "zero_grad", "__deepcopy__", "__reduce_ex__")


def _with_name(function: Callable[..., Any]) -> Callable[..., Any]:
    # functools.wraps has copied torch's mark of a step with hooks.
    function.__dict__.pop("hooked", None)
    function.__dict__.pop("__wrapped__", None)
    return function
