"""``optimizer.step()`` of the replicated form of "dear": remembered, and done when its results are used.

Whoever looks at the optimizer's state meanwhile has the rest of the step done first.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from torchext import _C
from torchext.ddp.step_hooks import unhooked_step
from torchext.ddp.under_way import own_gradient, set_own_gradient
from torchext.dear.dear_parameters import DearParameters
from torchext.dear.optimizer_state import groups_of, in_order

__all__ = ["DeferredStep"]

_OF_SCALER = ("grad_scale", "found_inf")


class _Gradient:
    """What a parameter is to be stepped with."""

    def __init__(self, parameter: nn.Parameter, averaged: bool) -> None:
        self.own = own_gradient(parameter)  # when step() was called
        self.averaged = averaged  # that is, what has been averaged counts, and the own one becomes it
        self.cleared = False  # since then
        self._version = None if self.own is None else self.own._version

    def check(self, name: str) -> None:
        """Raises RuntimeError if a script has changed it since."""
        if not self.averaged and self.own is not None and self.own._version != self._version:
            raise RuntimeError(
                f"dear: the gradient of {name} was changed between optimizer.step() and the next forward pass, in "
                "which the replicated form does that step; call sync.wait() before it is changed"
            )


class DeferredStep:
    """Keeps the hyperparameters and gradients of a step, and does it for some parameters at a time.

    Args:
        core: The C++ synchronizer.
        optimizer: Steps each parameter by itself; its class's step is what is done.
        parameters: The model's.
        names: Theirs.
        wait: Waits until no gradient is under way, and calls :meth:`finish`.
        own: The positions of the parameters that are the optimizer's; None: all.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        optimizer: torch.optim.Optimizer,
        parameters: DearParameters,
        names: list[str],
        wait: Callable[[], None],
        own: Callable[[], Collection[int] | None],
    ) -> None:
        self._core, self._optimizer, self._parameters, self._names, self._wait = (
            core,
            optimizer,
            parameters,
            names,
            wait,
        )
        self._own = own
        self._groups: list[dict[str, Any]] = []  # as they were, for the step under way
        self._left: dict[int, _Gradient] = {}  # by position: not stepped yet
        self._state: Any = None  # of that step, whatever a script has put in its place since
        self._scaler: dict[str, torch.Tensor | None] = {}  # what a GradScaler has told a fused optimizer, for that step
        self.running = False
        self._step = torch.compiler.disable(_in_no_mode(unhooked_step(optimizer)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Gives the optimizer a state of its own back; what has not been finished of the last step is not done."""
        self._left.clear()
        state = self._optimizer.state
        if isinstance(state, _FinishedState):
            self._optimizer.state = state.plain()

    def remember(self) -> None:
        """What ``optimizer.step()`` does, once the last one is finished."""
        optimizer, parameters = self._optimizer, self._parameters
        self._groups = [{key: _kept(value) for key, value in group.items()} for group in optimizer.param_groups]
        # The scaler takes them back when step() returns, and changes the scale in place.
        self._scaler = {name: _kept(getattr(optimizer, name)) for name in _OF_SCALER if hasattr(optimizer, name)}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                position = parameters.position_of(parameter)
                if position is None:
                    continue
                # What has been frozen since attach is stepped with the gradient that it still has, as by torch.
                averaged = position in parameters.averaged
                if parameter.requires_grad or averaged or own_gradient(parameter) is not None:
                    self._left[position] = _Gradient(parameter, averaged)
        parameters.averaged.drop(self._own())
        if type(optimizer.state) in (dict, collections.defaultdict):
            optimizer.state = _FinishedState(optimizer.state, self._look)
        self._state = optimizer.state
        if not isinstance(optimizer.state, _FinishedState):
            self._wait()  # nobody could tell that somebody looks

    def cleared(self) -> None:
        """The gradients have been set to None since the step was called."""
        for gradient in self._left.values():
            gradient.cleared = True

    def apply(self, positions: Iterable[int]) -> None:
        """Does the step for the parameters at these positions, where that has not been done; gradients are there."""
        wanted = [position for position in positions if position in self._left]
        if wanted:
            self._run(wanted)

    def finish(self) -> None:
        """Does what is left of the step; gradients are there."""
        if self._left and not self.running:
            self._run(list(self._left))

    def _look(self) -> None:
        if self._left and not self.running:
            self._wait()

    def _run(self, positions: list[int]) -> None:
        chosen = {position: self._left.pop(position) for position in positions}
        self._parameters.values_arrived(positions)
        optimizer = self._optimizer
        groups = optimizer.param_groups
        own = groups_of(self._groups, positions, self._parameters.position_of)
        optimizer.param_groups = [group for group in own if group["params"]]
        self.running = True  # who looks at the state now is the step
        state, optimizer.state = optimizer.state, self._state
        kept = len(optimizer.state)
        attributes = optimizer.__dict__
        now = {name: attributes.pop(name) for name in _OF_SCALER if name in attributes}  # for the step after this one
        attributes.update(self._scaler)
        later: dict[int, torch.Tensor | None] = {}
        try:
            later = self._put_gradients(chosen)
            self._step(optimizer)
        finally:
            for position, gradient in later.items():
                set_own_gradient(self._parameters[position], gradient)
            optimizer.param_groups = groups
            if len(optimizer.state) != kept:
                in_order(optimizer)
            optimizer.state = state
            self.running = False
            for name in self._scaler:
                del attributes[name]
            attributes.update(now)

    def _put_gradients(self, chosen: dict[int, _Gradient]) -> dict[int, torch.Tensor | None]:
        """Makes gradients the parameters' own; returns those that are to be it after the step, where it is others."""
        later = {}
        for position, gradient in chosen.items():
            gradient.check(self._names[position])
            parameter = self._parameters[position]
            now, kept = own_gradient(parameter), gradient.own
            if gradient.averaged:
                kept = self._core.gradient(position)
                if kept is not None and gradient.own is not None and kept.data_ptr() == gradient.own.data_ptr():
                    kept = gradient.own
            if now is not gradient.own or gradient.cleared:
                later[position] = now
            set_own_gradient(parameter, kept)
        return later


class _FinishedState(collections.defaultdict):  # type: ignore[type-arg]
    """The state of an optimizer, which has its step finished before anybody looks at it."""

    def __init__(self, state: dict[Any, Any], look: Callable[[], None]) -> None:
        super().__init__(getattr(state, "default_factory", None), state)
        self._look = look

    def plain(self) -> Any:
        """The same without looking."""
        made: Any = collections.defaultdict(self.default_factory) if self.default_factory is not None else {}
        made.update(dict.items(self))
        return made

    def __reduce__(self) -> Any:
        self._look()
        return self.plain().__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        import copy

        self._look()
        return copy.deepcopy(self.plain(), memo)


def _looking(name: str) -> Callable[..., Any]:
    def method(self: _FinishedState, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return getattr(collections.defaultdict, name)(self, *args, **kwargs)

    return method


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__"),
    *("__ne__", "__or__", "__ior__", "__repr__", "copy", "get", "setdefault", "pop", "popitem", "clear", "update"),
    *("keys", "values", "items"),
):
    setattr(_FinishedState, _name, _looking(_name))


def _in_no_mode(step: Callable[..., Any]) -> Callable[[torch.optim.Optimizer], None]:
    """The step, out of the modes that a forward pass may be in; without gradients, as all steps."""

    def alone(optimizer: torch.optim.Optimizer) -> None:
        if _is_recorded():
            _in_a_thread(lambda: without_modes(optimizer))
        else:
            without_modes(optimizer)

    def without_modes(optimizer: torch.optim.Optimizer) -> None:
        devices = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))  # first: it turns gradients on
            modes.enter_context(torch.no_grad())
            for device in devices:
                modes.enter_context(torch.autocast(device, enabled=False))
            step(optimizer)

    return alone


def _is_recorded() -> bool:
    """Whether something takes operations of this thread for its own: a transform, a tracer, a mode."""
    return bool(
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
    )


def _in_a_thread(action: Callable[[], None]) -> None:
    """Does it in a thread of its own, which is in none of them."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(action).result()


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
