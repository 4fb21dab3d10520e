"""What an optimizer holds while its model is trained by "dear": parameters whose gradients are waited for."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext._given_state import agreed_states
from torchext._gradient_watch import GradientWatch
from torchext._state_slices import StateSlices

__all__ = ["ELEMENTWISE", "DearOptimizer", "SteppedParameter", "check_stepped", "stood_for", "unhooked_step"]

# Each element of a parameter is stepped by itself: a slice is stepped as the whole would be.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
    torch.optim.Rprop,
)
_NOT_COPIED = (
    "dear: an attached optimizer cannot be copied or pickled, its parameters are stepped for a model and a group of "
    "ranks; take optimizer.state_dict() (on all ranks, in the sharded form it is collective) and load it into a new "
    "optimizer of the copied model, or call detach() of what torchext.attach returned first"
)
_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__
# A step is cut into so many parts at most: each of them asks for every gradient.
_PARTS = 16
_CLIP = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__
# A comprehension has code of its own before Python 3.12.
_CLIPS = {_CLIP, *(inside for inside in _CLIP.co_consts if isinstance(inside, types.CodeType))}


def check_stepped(optimizer: torch.optim.Optimizer, form: str) -> None:
    """Raises TypeError for an optimizer that a form of "dear" cannot step."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("torchext.attach: LBFGS steps several times inside one call, with its closure; DeAR needs one")
    if form == "replicated" or kind in ELEMENTWISE or getattr(kind, "elementwise", False):
        return
    raise TypeError(
        f"torchext.attach: {kind.__name__} is not known to step every element of a parameter by itself, as DeAR's "
        "sharded form needs; use DeAROptions(form='replicated'), or, if it does, set the class attribute "
        f"{kind.__name__}.elementwise = True"
    )


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The optimizer's ``step``, to call with it, behind the wrapper that runs its hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


class SteppedParameter(nn.Parameter):
    """What is stepped of a parameter, sharing its memory; its gradient is the averaged one, waited for.

    Sharded form: this rank's slice, with one dimension. Replicated form, and plain all-reduce: the whole parameter.
    """

    held_by: DearOptimizer
    position: int  # of the parameter among the model's

    def __new__(cls, held_by: DearOptimizer, position: int, memory: torch.Tensor) -> SteppedParameter:
        """Stands for parameter number ``position``."""
        self = super().__new__(cls, memory, True)
        self.held_by, self.position = held_by, position
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """A copy would have nothing that averages its gradients: there are none.

        Raises:
            TypeError: always.
        """
        raise TypeError(_NOT_COPIED)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """As copies.

        Raises:
            TypeError: always.
        """
        raise TypeError(_NOT_COPIED)

    @property
    def dropped(self) -> bool:
        """Whether its gradient was set to None since the last step."""
        return self.held_by.is_dropped(self.position)

    @property
    def grad(self) -> torch.Tensor | None:
        """The averaged gradient; None where no rank has one."""
        return self.held_by.gradient(self.position, caller=sys._getframe(1).f_code)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            _refuse_checkpoint_functions()
            raise RuntimeError("dear: averaged gradients are computed; change them in place")
        self.held_by.drop(self.position)


def stood_for(held: torch.Tensor) -> torch.Tensor:
    """The model's parameter that an optimizer's parameter stands for: without "dear" it is that itself."""
    return held.held_by.parameter(held) if isinstance(held, SteppedParameter) else held


class DearOptimizer:
    """Turns an optimizer over to SteppedParameters, and back.

    Param groups stay the objects that they are, so schedulers go on; ``state_dict()`` is that of the plain optimizer
    (in the sharded form collective), and ``load_state_dict()`` takes one.

    Args:
        core: The C++ synchronizer.
        optimizer: In the sharded form an elementwise one.
        parameters: The model's, in registration order.
        group: To gather state over.
        wait: The synchronizer's; parameters and state are what the last step makes of them afterwards.
        watch: Sees what is done to the parameters' own gradients.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        wait: Callable[[], None],
        watch: GradientWatch,
    ) -> None:
        self.core, self.wait = core, wait
        self._dropped: set[int] = set()  # gradients set to None one by one
        self._optimizer, self._group, self._watch = optimizer, group, watch
        self._parameters = list(parameters)
        self._position = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._slices = None if core.replicated else StateSlices(self._parameters, group)
        self._held = False
        self._whole = True  # what is held are whole parameters
        self._stepping = self._agreed = self._begun = False
        self._early: set[int] = set()  # stepped while other gradients were on their way
        self._only: set[int] | None = None  # what such a step is about
        # The optimizer's own code that asks for gradients in its step; None: it is not known to step part by part.
        in_parts = self._slices is not None and type(optimizer) in ELEMENTWISE
        self._asking = getattr(type(optimizer), "_init_group").__code__ if in_parts else None  # noqa: B009 - untyped
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: _refuse_checkpoint_functions()),
            optimizer.register_state_dict_post_hook(self._complete),
            optimizer.register_load_state_dict_pre_hook(self._accept),
        ]
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def hold(self) -> None:
        """Replaces the parameters, and their state by that of what is stepped now.

        Local; but where slices become whole again, for plain all-reduce, collective.
        """
        whole = self._slices is None or self.core.allreduce
        if self._held and whole == self._whole:
            return
        states = self._whole_states()
        self._held, self._whole = True, whole
        self._replace(self._standing_for, states)

    def release(self, with_state: bool = True) -> None:
        """Gives the optimizer the parameters back, with their whole state: where it has slices, collective.

        Args:
            with_state: False: without, for when the others cannot be reached.
        """
        if not self._held:
            return
        states = self._whole_states() if with_state else {}
        self._held, self._whole = False, True
        self._replace(lambda p: self._parameters[p.position] if isinstance(p, SteppedParameter) else p, states)

    def remove(self) -> None:
        """Takes the hooks off, once the parameters have been given back."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.__dict__.pop("zero_grad", None)

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the model's."""
        return id(parameter) in self._position

    def parameter(self, stepped: SteppedParameter) -> nn.Parameter:
        """The model's parameter of which something is stepped."""
        return self._parameters[stepped.position]

    def gradient(self, position: int, caller: Any = None) -> torch.Tensor | None:
        """The averaged gradient of what is stepped of a parameter; waits for it."""
        if caller in _CLIPS and self._slices is not None:
            raise RuntimeError(
                "dear: torch.nn.utils.clip_grad_norm_ on the optimizer's parameters would take the norm of this rank's "
                "slices alone, in the sharded form; clip with sync.clip_grad_norm_()"
            )
        if self.core.allreduce:
            return self._reduced(position)
        if caller is not None and caller is self._asking and self._stepping and not self._begun:
            self._begun = True
            self._step_in_parts()
        if (
            position in self._dropped
            or position in self._early
            or (self._only is not None and position not in self._only)
        ):
            return None
        if self._slices is None and not self.core.gathered:
            self.check_gradients()  # before they are replaced by the averaged ones
            self._watch.forget()
        if caller is _UNSCALE and self._slices is not None and not self._stepping and not self._agreed:
            self._agreed = True
            self._agree_on_overflow()
        return self.core.gradient(position)

    def _reduced(self, position: int) -> torch.Tensor | None:
        """The averaged gradient where DDP has made the parameter's own one that."""
        if self._slices is None:
            # As with those that are gathered: once read, K-FAC may change them in front of a step.
            self._watch.check()
            self._watch.forget()
        own = self._parameters[position].grad
        return None if own is None else own.data  # whose changes are not counted as the parameter's

    def drop(self, position: int) -> None:
        """As if no rank had a gradient for this parameter, until the step is over."""
        if self.core.allreduce:
            self._parameters[position].grad = None
            self._watch.forget(self._parameters[position])
        else:
            self._dropped.add(position)

    def is_dropped(self, position: int) -> bool:
        """Whether :meth:`drop` was called for it."""
        return position in self._dropped

    def check_gradients(self) -> None:
        """Raises RuntimeError if a parameter's own gradient was changed, replaced or dropped after the backward pass.

        The change would be lost, or count while the model trains by plain all-reduce and be lost later.
        """
        self.core.before_step()
        self._watch.check()

    def before_step(self) -> None:
        """Checks what the optimizer holds; its step begins."""
        self.check_gradients()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, SteppedParameter) and parameter.requires_grad:
                    raise ValueError(
                        "dear: the optimizer has been given a parameter after torchext.attach; add parameters to model "
                        "and optimizer first, then wrap and attach"
                    )
        self._stepping = True

    def after_step(self) -> None:
        """The optimizer's step is over."""
        self._stepping = self._agreed = self._begun = False
        self._dropped.clear()
        self._early.clear()
        self._watch.forget()

    def stepped(self) -> Iterator[SteppedParameter]:
        """What the optimizer holds of the model."""
        for group in self._optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if isinstance(parameter, SteppedParameter))

    def sharded_state(self) -> dict[str, Any]:
        """The state for torch.distributed.checkpoint; see Synchronizer."""
        states = self._states() or self._first_states()
        if self._slices is None:
            return {f"{position}.{key}": value for position, values in states.items() for key, value in values.items()}
        if self._whole:
            states = {position: self._slices.cut(values, position) for position, values in states.items()}
        return self._slices.distributed(states)

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Takes the values of :meth:`sharded_state`, on all ranks or on none. Collective."""
        trained = {position for position, _ in self._trained()}
        states = agreed_states(state, trained, self._expected, type(self._optimizer) in ELEMENTWISE, self._group)
        if self._slices is not None and self._whole:
            states = self._slices.whole(states)
        for number, parameter in self._trained():
            if number in states:
                self._optimizer.state[parameter] = states[number]

    def _expected(self, positions: Collection[int]) -> dict[int, dict[str, Any]]:
        """This rank's part of the state of parameters, as it is or as the first step will make it. Local."""
        states = self._states()
        if type(self._optimizer) in ELEMENTWISE and not all(position in states for position in positions):
            states = {**self._first_states(), **states}
        if self._slices is not None and self._whole:
            states = {position: self._slices.cut(values, position) for position, values in states.items()}
        return states

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.core.clear_gradients()
        self.after_step()
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            elif self._slices is None:
                parameter.grad = torch.zeros_like(parameter.grad)  # a step under way may still need the old one
            else:
                if parameter.grad.grad_fn is None:
                    parameter.grad.requires_grad_(False)  # a view of DDP's buckets cannot be detached in place
                else:
                    parameter.grad.detach_()
                parameter.grad.zero_()

    def _step_in_parts(self) -> None:
        """Steps what has arrived while the rest is on its way; what arrives last is left to the step that asks for it.

        Otherwise the link would be idle while everything is stepped, between the last reduce-scatter and the first
        all-gather. Called when the optimizer itself asks, so that what runs before its step has seen all gradients.
        """
        buckets = [(self.core.bucket_of(stepped.position), stepped.position) for stepped in self.stepped()]
        known, total = 0, self.core.bucket_count
        stride = max(1, -(-total // _PARTS))
        arrived = self.core.arrived_buckets(stride - 1)
        while arrived < total:
            part = {position for bucket, position in buckets if bucket is not None and known <= bucket < arrived}
            if part:
                self._only = part
                try:
                    unhooked_step(self._optimizer)(self._optimizer)
                finally:
                    self._only = None
                self._early |= part
            known, arrived = arrived, self.core.arrived_buckets(arrived + stride - 1)

    def _agree_on_overflow(self) -> None:
        """Every rank sees infinite or NaN gradients if one does: a GradScaler must skip a step on all or none."""
        gradients = [p.grad for p in self.stepped() if p.grad is not None and p.grad.numel() > 0]
        bad = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        anywhere = torch.tensor([float(bad)])
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._group)
        if anywhere.item() and not bad and gradients:
            gradients[0].view(-1)[0] = float("inf")

    def _standing_for(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is stepped of a parameter, instead of it or of what stood for it before."""
        position = self._position_of(parameter)
        if position is None or not parameter.requires_grad:
            return parameter
        memory = self._parameters[position].detach() if self._whole else self.core.stepped(position)
        return SteppedParameter(self, position, memory)

    def _replace(self, other: Callable[[torch.Tensor], torch.Tensor], states: Mapping[int, Mapping[str, Any]]) -> None:
        """Has the optimizer hold something else, with this whole state, by position."""
        self._optimizer.state, before = _like(self._optimizer.state), self._optimizer.state
        for group in self._optimizer.param_groups:
            group["params"] = [other(parameter) for parameter in group["params"]]
        for parameter in self._order():
            position = self._position_of(parameter)
            if parameter in before:
                self._optimizer.state[parameter] = before[parameter]  # was not replaced
            elif position is not None and position in states:
                self._optimizer.state[parameter] = self._cut(states[position], position)

    def _cut(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        return dict(values) if self._slices is None or self._whole else self._slices.cut(values, position)

    def _trained(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What the optimizer holds of the model, SteppedParameters or not, with their positions."""
        for parameter in self._order():
            position = self._position_of(parameter)
            if position is not None and parameter.requires_grad:
                yield position, parameter

    def _position_of(self, parameter: torch.Tensor) -> int | None:
        return parameter.position if isinstance(parameter, SteppedParameter) else self._position.get(id(parameter))

    def _states(self) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps of them, by position."""
        state = self._optimizer.state
        return {position: dict(state[parameter]) for position, parameter in self._trained() if parameter in state}

    def _whole_states(self) -> dict[int, dict[str, Any]]:
        """The same, whole. Where it is in slices, collective."""
        states = self._states()
        return states if self._slices is None or self._whole else self._slices.whole(states)

    def _first_states(self) -> dict[int, dict[str, Any]]:
        """What the first step creates, to load into: by a step with zero gradients on tensors that are thrown away."""
        optimizer = self._optimizer
        if type(optimizer) not in ELEMENTWISE:
            raise RuntimeError(
                f"dear: {type(optimizer).__name__} has no state yet, and only for the elementwise optimizers of "
                "torch.optim is it known what the first step creates; take a step before "
                "sync.optimizer_state_dict(), then load parameters and state"
            )
        zeros = {parameter: _zeros(parameter) for _, parameter in self._trained()}
        state, groups = optimizer.state, optimizer.param_groups
        optimizer.state = _like(state)
        optimizer.param_groups = [
            {**group, "params": [zeros[parameter] for parameter in group["params"] if parameter in zeros]}
            for group in groups
        ]
        try:
            unhooked_step(optimizer)(optimizer)
            created = optimizer.state
        finally:
            optimizer.state, optimizer.param_groups = state, groups
        return {
            position: dict(created[zeros[parameter]])
            for position, parameter in self._trained()
            if zeros[parameter] in created
        }

    def _complete(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """After optimizer.state_dict(): slices become whole again."""
        if self._slices is None or self._whole:
            return None
        self.core.wait_all()
        self._slices.meet()
        return self._translated(state_dict, self._whole_states())

    def _accept(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Before optimizer.load_state_dict(): a whole state becomes this rank's slices."""
        if self._slices is None or self._whole:
            return None
        given = state_dict["state"]
        cut = {
            parameter.position: self._cut(given[index], parameter.position)
            for index, parameter in enumerate(self._order())
            if index in given and isinstance(parameter, SteppedParameter)
        }
        return self._translated(state_dict, cut)

    def _order(self) -> list[torch.Tensor]:
        """By the numbers that a state_dict gives parameters."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _translated(self, state_dict: dict[str, Any], states: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The state_dict with these states in the places of what the optimizer steps."""
        state = dict(state_dict["state"])
        for index, parameter in enumerate(self._order()):
            if isinstance(parameter, SteppedParameter) and parameter.position in states:
                state[index] = states[parameter.position]
        return {**state_dict, "state": state}


def _refuse_checkpoint_functions() -> None:
    """Raises RuntimeError if get_state_dict or one of its kind asks; they look for the model's own parameters."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(
                "dear: torch.distributed.checkpoint's get_state_dict() and set_state_dict() do not find the model's "
                "parameters in an attached optimizer; save sync.optimizer_state_dict(), load it with "
                "sync.load_optimizer_state_dict(), and take the model's state by get_model_state_dict()"
            )
        frame = frame.f_back


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(parameter.detach()).requires_grad_()
    zeros.grad = torch.zeros_like(zeros)
    return zeros


def _like(state: Any) -> Any:
    """An empty mapping of the kind that optimizers use."""
    return type(state)(state.default_factory) if hasattr(state, "default_factory") else type(state)()
