"""How an optimizer steps a model that is trained by "dear": by parameters whose gradients are waited for."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext._dear_parameter import SteppedParameter
from torchext._dear_refusals import ELEMENTWISE, NOT_AVERAGED
from torchext._dear_state import DearState, groups_of
from torchext._gradient_watch import GradientWatch, Mark, is_marked
from torchext._step_hooks import unhooked_step

__all__ = ["DearOptimizer"]

# Called with a wrapper of the optimizer as its self it passes by the optimizer's own.
_ZERO_GRAD = inspect.unwrap(torch.optim.Optimizer.zero_grad).__code__
_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__
# A step is cut into so many parts at most: each of them goes through the param groups.
_PARTS = 16
_CLIP = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__
# A comprehension has code of its own before Python 3.12. By their ids: to hash code is to hash all that it says.
_CLIPS = {id(_CLIP), *(id(inside) for inside in _CLIP.co_consts if isinstance(inside, types.CodeType))}


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
        self.state = DearState(core, optimizer, parameters, group)
        self._dropped: set[int] = set()  # gradients set to None one by one
        self._optimizer, self._group, self._watch = optimizer, group, watch
        self._parameters = list(parameters)
        self._held = False
        self._stepping = self._agreed = self._begun = self._checked = False
        self._over = False  # the gradients that were gathered last are those of a step that is over
        self._replaced: list[Mark] = []  # what these took the place of, unless that was in a step
        self._ended = False  # the step has just done so, and the C++ side has not heard of it
        self._deferring = False  # what is left of a step is being done
        self._early: set[int] = set()  # stepped while other gradients were on their way
        # The optimizer's own code that asks for gradients in its step; None: it is not known to step part by part.
        in_parts = self.state.sharded and type(optimizer) in ELEMENTWISE
        self._asking = getattr(type(optimizer), "_init_group").__code__ if in_parts else None  # noqa: B009 - untyped
        # One that is not torch's does more than clear gradients, and is called after these have been cleared.
        own_class = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        self._before = optimizer.__dict__.get("zero_grad")
        self._cleared = optimizer.zero_grad if own_class or self._before is not None else None
        self._clearing = False
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def hold(self) -> None:
        """Replaces the parameters, and their state by that of what is stepped now.

        Local; but where slices become whole again, for plain all-reduce, collective.
        """
        whole = not self.state.sharded or self.core.allreduce
        if not self._held or whole != self.state.whole:
            self.state.move(self._standing_for, whole)
            self._held = True

    def release(self, with_state: bool = True) -> None:
        """Gives the optimizer the parameters back, with their whole state: where it has slices, collective.

        Args:
            with_state: False: without, for when the others cannot be reached.
        """
        if self._held:
            self.state.move(self._own, True, with_state)
            self._held = False

    def remove(self) -> None:
        """Takes the hooks off, once the parameters have been given back."""
        self.state.remove()
        if self._before is not None:
            self._optimizer.zero_grad = self._before  # type: ignore[method-assign]
        else:
            self._optimizer.__dict__.pop("zero_grad", None)

    def parameter(self, stepped: SteppedParameter) -> nn.Parameter:
        """The model's parameter of which something is stepped."""
        return self._parameters[stepped.position]

    def gradient(self, position: int, caller: Any = None) -> torch.Tensor | None:
        """The averaged gradient of what is stepped of a parameter, waited for.

        Else the parameter's own, for who would set it to zero: no step is under way or begins, and there is none to
        step with any more.
        """
        if self._clearing or caller is _ZERO_GRAD:
            return self._parameters[position].grad
        if id(caller) in _CLIPS and self.state.sharded:
            raise RuntimeError(
                "dear: torch.nn.utils.clip_grad_norm_ on the optimizer's parameters would take the norm of this rank's "
                "slices alone, in the sharded form; clip with sync.clip_grad_norm_()"
            )
        for_step = self._stepping or caller is _UNSCALE
        if for_step and not self._checked:
            self._watch.check_averaged()
            self._checked = True
        if self.core.allreduce and not self._deferring:  # what is left of the last step has gathered gradients
            return self._reduced(position)
        if caller is not None and caller is self._asking and self._stepping and not self._begun:
            self._begun = True
            self._step_in_parts()
        if position in self._dropped or position in self._early:
            return None
        if not (for_step or self._deferring or self._averaged(position)):
            return self._unaveraged(position)
        if not self.state.sharded and not self.core.gathered:
            self.check_gradients()  # before they are replaced by the averaged ones
            self._watch.forget()
            self._over, self._replaced = False, self._watch.marks()
        if caller is _UNSCALE and self.state.sharded and not self._stepping and not self._agreed:
            self._agreed = True
            self._agree_on_overflow()
        gradient = self.core.gradient(position)
        if gradient is None and for_step and self._parameters[position].grad is not None:
            raise RuntimeError(NOT_AVERAGED)
        return gradient

    def _reduced(self, position: int) -> torch.Tensor | None:
        """The averaged gradient where DDP has made the parameter's own one that."""
        if not self.state.sharded:
            # As with those that are gathered: once read, K-FAC may change them in front of a step.
            self._watch.check()
            self._watch.forget()
        own = self._parameters[position].grad
        return None if own is None else own.data  # whose changes are not counted as the parameter's

    def _unaveraged(self, position: int) -> torch.Tensor | None:
        """The parameter's own gradient where that is no averaged one."""
        if not self.state.sharded:
            self.wait()  # it is in the memory of that which the last step needs
        own = self._parameters[position].grad
        return None if own is None else own.data  # as in _reduced()

    def drop(self, position: int) -> None:
        """As if no rank had a gradient for this parameter, until there is a new one."""
        if not self.core.allreduce and self._averaged(position):
            self._dropped.add(position)
        self._parameters[position].grad = None
        self._watch.forget(self._parameters[position])

    def is_dropped(self, position: int) -> bool:
        """Whether :meth:`drop` was called for it."""
        return position in self._dropped

    def expect_backward(self) -> None:
        """A forward pass has begun whose backward pass averages gradients: all of them, whatever was dropped before.

        What ranks agreed on was the last ones: a scaler may skip their step, and the model clear them.
        """
        if self.core.gathered and not self._over and not self.core.allreduce:
            self._add_to_gathered()
        self._dropped.clear()
        self._agreed = self._checked = False

    def _add_to_gathered(self) -> None:
        """The coming pass adds to the averaged gradients, as on the ranks where these are the parameters' own.

        A rank that had none of a parameter, or one in another memory order, has the averaged one elsewhere.
        """
        marked = [(p, mark) for p, mark in zip(self._watch.parameters, self._replaced, strict=False) if mark]
        own = {parameter: parameter.grad for parameter, _ in marked}
        kept = {parameter for parameter, mark in marked if is_marked(own[parameter], mark)}
        if all(own[parameter] is None for parameter in kept):
            return  # they have been cleared
        for position, parameter in enumerate(self._parameters):
            if parameter in kept and position not in self._dropped:
                gradient, before = self.core.gradient(position), own[parameter]
                if gradient is not None and (before is None or before.data_ptr() != gradient.data_ptr()):
                    parameter.grad = gradient

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
        self._stepping, self._begun, self._checked = True, False, False

    def has_gradients(self) -> bool:
        """Whether a step that is called now, to be done later, has anything to step with; else all are None in it.

        Raises:
            RuntimeError: It would be with gradients that were not averaged.
        """
        self._watch.check_averaged()
        if not (self.core.gathered and self._over):
            return True
        if any(parameter.grad is not None for parameter in self._parameters):
            raise RuntimeError(NOT_AVERAGED)
        self._dropped.update(range(len(self._parameters)))
        return False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, what is left of a step is done: it takes the gradients of that."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def step_ends(self) -> None:
        """The optimizer's step is over, and hooks on it are called before :meth:`after_step` is."""
        self._stepping, self._ended = False, True

    def after_step(self) -> None:
        """The optimizer's step is over."""
        self._over, self._ended = True, False
        self._forget()
        self._watch.used()

    def _forget(self) -> None:
        self._stepping = self._agreed = self._begun = self._checked = False
        self._dropped.clear()
        self._early.clear()

    def stepped(self) -> Iterator[SteppedParameter]:
        """What the optimizer holds of the model."""
        for group in self._optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if isinstance(parameter, SteppedParameter))

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if self._ended:
            self.wait()  # the C++ side must hear first that there was a step
        self.core.clear_gradients()
        self._forget()
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            elif not self.state.sharded:
                parameter.grad = torch.zeros_like(parameter.grad)  # a step under way may still need the old one
            else:
                if parameter.grad.grad_fn is None:
                    parameter.grad.requires_grad_(False)  # a view of DDP's buckets cannot be detached in place
                else:
                    parameter.grad.detach_()
                parameter.grad.zero_()
        if self._cleared is not None:
            self._clearing = True
            try:
                self._cleared(**({} if set_to_none else {"set_to_none": False}))
            finally:
                self._clearing = False
        self._watch.used(zeroed=not set_to_none)

    def _averaged(self, position: int) -> bool:
        """Whether there is an averaged gradient to step with; waits for it."""
        if self._ended:
            return False
        if self.core.gathered:
            return not self._over
        return self.core.own_gradient(position) is not None

    def _step_in_parts(self) -> None:
        """Steps what has arrived while the rest is on its way; what arrives last is left to the step that asks for it.

        Otherwise the link would be idle while everything is stepped, between the last reduce-scatter and the first
        all-gather. Called when the optimizer itself asks, so that what runs before its step has seen all gradients.
        """
        buckets = [(self.core.bucket_of(stepped.position), stepped.position) for stepped in self.stepped()]
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        known, total = 0, self.core.bucket_count
        stride = max(1, -(-total // _PARTS))
        arrived = self.core.arrived_buckets(stride - 1)
        while arrived < total:
            part = {position for bucket, position in buckets if bucket is not None and known <= bucket < arrived}
            if part:
                optimizer.param_groups = groups_of(groups, part)
                try:
                    unhooked_step(optimizer)(optimizer)
                finally:
                    optimizer.param_groups = groups
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
        position = self.state.position_of(parameter)
        if position is None or not parameter.requires_grad:
            return parameter
        memory = self._parameters[position].detach() if self.state.whole else self.core.stepped(position)
        return SteppedParameter(self, position, memory)

    def _own(self, held: torch.Tensor) -> torch.Tensor:
        """What the optimizer held before it was given something to step."""
        return self._parameters[held.position] if isinstance(held, SteppedParameter) else held
