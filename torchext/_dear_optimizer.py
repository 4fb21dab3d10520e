"""What an optimizer holds while its model is trained by "dear": parameters whose gradients are waited for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext.backends import backend_of

__all__ = ["ELEMENTWISE", "DearOptimizer", "SteppedParameter", "check_stepped"]

# Each element of a parameter is stepped by itself: a slice is stepped as the whole would be.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
    torch.optim.Rprop,
)
# State that belongs to the whole parameter. Told from a slice by its shape, but for parameters without dimensions.
_SCALARS = {"step", "eta", "mu", "mu_product"}
# How long a rank waits for the others where scripts may forget them.
_MEETING = timedelta(seconds=60)
_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__


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


class SteppedParameter(nn.Parameter):
    """What is stepped of a parameter, sharing its memory; its gradient is the averaged one, waited for.

    Sharded form: this rank's slice, with one dimension. Replicated form: the whole parameter.
    """

    held_by: DearOptimizer
    position: int  # of the parameter among the model's

    def __new__(cls, held_by: DearOptimizer, position: int) -> SteppedParameter:
        """Stands for parameter number ``position``."""
        self = super().__new__(cls, held_by.core.stepped(position), True)
        self.held_by, self.position = held_by, position
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """The averaged gradient; None where no rank has one."""
        return self.held_by.gradient(self.position, caller=sys._getframe(1).f_code)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise RuntimeError("dear: averaged gradients are computed; change them in place")
        self.held_by.dropped.add(self.position)


class DearOptimizer:
    """Turns an optimizer over to SteppedParameters, and back.

    Param groups stay the objects that they are, so schedulers go on; ``state_dict()`` is that of the plain optimizer
    (in the sharded form collective), and ``load_state_dict()`` takes one.

    Args:
        core: The C++ synchronizer.
        optimizer: In the sharded form an elementwise one.
        parameters: The model's, in registration order.
        group: To gather state over.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
    ) -> None:
        self.core = core
        self.dropped: set[int] = set()  # gradients set to None one by one
        self._optimizer, self._group = optimizer, group
        self._parameters = list(parameters)
        self._position = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._world, self._rank = group.size(), group.rank()
        self._whole = core.replicated
        self._held = False
        self._stepping = self._agreed = False
        self._handles = [
            optimizer.register_state_dict_post_hook(self._complete),
            optimizer.register_load_state_dict_pre_hook(self._cut),
        ]
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def hold(self) -> None:
        """Replaces the parameters, and their state by that of what is stepped. Local."""
        if self._held:
            return
        state, self._optimizer.state = self._optimizer.state, _like(self._optimizer.state)
        for group in self._optimizer.param_groups:
            group["params"] = [self._replaced(parameter, state) for parameter in group["params"]]
        self._held = True

    def release(self) -> None:
        """Gives the optimizer the parameters back, with their whole state. In the sharded form collective."""
        if not self._held:
            return
        full = self._gathered()
        self._optimizer.state = _like(self._optimizer.state)
        for group in self._optimizer.param_groups:
            group["params"] = [
                self._parameters[p.position] if isinstance(p, SteppedParameter) else p for p in group["params"]
            ]
        for position, values in full.items():
            self._optimizer.state[self._parameters[position]] = values
        self._held = False

    def remove(self) -> None:
        """Takes the hooks off, once the parameters have been given back."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.__dict__.pop("zero_grad", None)

    def gradient(self, position: int, caller: Any = None) -> torch.Tensor | None:
        """The averaged gradient of what is stepped of a parameter; waits for it."""
        if position in self.dropped:
            return None
        if caller is _UNSCALE and not self._whole and not self._stepping and not self._agreed:
            self._agreed = True
            self._agree_on_overflow()
        return self.core.gradient(position)

    def before_step(self) -> None:
        """Checks what the optimizer holds; its step begins."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                known = isinstance(parameter, SteppedParameter) if self._held else id(parameter) in self._position
                if not known and parameter.requires_grad:
                    raise ValueError(
                        "dear: the optimizer has been given a parameter after torchext.attach; add parameters to model "
                        "and optimizer first, then wrap and attach"
                    )
        self._stepping = True

    def after_step(self) -> None:
        """The optimizer's step is over."""
        self._stepping = self._agreed = False
        self.dropped.clear()

    def stepped(self) -> Iterator[SteppedParameter]:
        """What the optimizer holds of the model."""
        for group in self._optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if isinstance(parameter, SteppedParameter))

    def sharded_state(self) -> dict[str, Any]:
        """The state as DTensors, one dimension each, for torch.distributed.checkpoint; see Synchronizer."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self._group, "cpu")
        state: dict[str, Any] = {}
        for parameter in self.stepped():
            whole = self._parameters[parameter.position].numel()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not self._whole and _is_slice(value, parameter):
                    value = DTensor.from_local(
                        value, mesh, [Shard(0)], run_check=False, shape=torch.Size([whole]), stride=(1,)
                    )
                state[f"{parameter.position}.{key}"] = value
        return state

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Takes the values of :meth:`sharded_state`."""
        for parameter in self.stepped():
            prefix = f"{parameter.position}."
            values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if values:
                self._optimizer.state[parameter] = {
                    key: value.to_local() if hasattr(value, "to_local") else value for key, value in values.items()
                }

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.core.clear_gradients()
        self.after_step()
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            elif self._whole:
                parameter.grad = torch.zeros_like(parameter.grad)  # a step under way may still need the old one
            else:
                parameter.grad.detach_().zero_()

    def _meet(self) -> None:
        """All ranks are here, or an error says who is not: a script may ask for the state on rank 0 alone."""
        if self._world == 1:
            return
        backend = backend_of(self._group)
        limit = min(backend.options._timeout, _MEETING)
        try:
            backend.monitored_barrier(limit, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"dear: optimizer.state_dict() is collective, and some rank did not call it within {limit.seconds} s; "
                f"call it on every rank, and save it on one ({error})"
            ) from error

    def _agree_on_overflow(self) -> None:
        """Every rank sees infinite or NaN gradients if one does: a GradScaler must skip a step on all or none."""
        gradients = [p.grad for p in self.stepped() if p.grad is not None and p.grad.numel() > 0]
        bad = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        anywhere = torch.tensor([float(bad)])
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._group)
        if anywhere.item() and not bad and gradients:
            gradients[0].view(-1)[0] = float("inf")

    def _replaced(self, parameter: torch.Tensor, state: Any) -> torch.Tensor:
        """The slice of a parameter, with the slice of its state."""
        position = self._position.get(id(parameter))
        if position is None or not parameter.requires_grad:
            return parameter
        piece = SteppedParameter(self, position)
        if parameter in state:
            values = state[parameter]
            self._optimizer.state[piece] = {key: self._slice(key, value, position) for key, value in values.items()}
        return piece

    def _slice(self, key: str, value: Any, position: int) -> Any:
        """This rank's slice of one value of a parameter's state."""
        parameter = self._parameters[position]
        if self._whole or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        if key in _SCALARS and not value.dim():
            return value
        ordered = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        each = -(-parameter.numel() // self._world)
        return ordered.as_strided((parameter.numel(),), (1,))[each * self._rank : each * (self._rank + 1)].clone()

    def _gathered(self) -> dict[int, dict[str, Any]]:
        """The whole state, by position of the parameter. Collective."""
        full: dict[int, dict[str, Any]] = {}
        pieces: dict[torch.dtype, list[tuple[int, str, torch.Tensor]]] = {}
        for parameter in self.stepped():
            values = self._optimizer.state.get(parameter)
            if values is None:
                continue
            full[parameter.position] = dict(values)
            for key, value in values.items():
                if not self._whole and _is_slice(value, parameter):
                    pieces.setdefault(value.dtype, []).append((parameter.position, key, value))
        for dtype, entries in pieces.items():
            sizes = [-(-self._parameters[position].numel() // self._world) for position, _, _ in entries]
            own = torch.zeros(sum(sizes), dtype=dtype)
            for (_, _, value), place in zip(entries, torch.split(own, sizes), strict=True):
                place[: value.numel()] = value
            everyone = torch.empty(self._world * own.numel(), dtype=dtype)
            dist.all_gather_into_tensor(everyone, own, group=self._group)
            split = torch.split(everyone.view(self._world, -1), sizes, dim=1)
            for (position, key, _), parts in zip(entries, split, strict=True):
                like = self._parameters[position]
                whole = torch.empty_like(like, dtype=dtype, requires_grad=False)
                whole.as_strided((whole.numel(),), (1,)).copy_(parts.reshape(-1)[: whole.numel()])
                full[position][key] = whole
        return full

    def _complete(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """After optimizer.state_dict(): slices become whole again."""
        if not self._held:
            return None
        self.core.wait_all()
        if not self._whole:
            self._meet()
        full = self._gathered()
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = {
            index: full[p.position]
            if isinstance(p, SteppedParameter) and p.position in full
            else state_dict["state"][index]
            for index, p in enumerate(order)
            if index in state_dict["state"]
        }
        return {**state_dict, "state": state}

    def _cut(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Before optimizer.load_state_dict(): a whole state becomes this rank's slices."""
        if not self._held:
            return None
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = dict(state_dict["state"])
        for index, parameter in enumerate(order):
            if isinstance(parameter, SteppedParameter) and index in state:
                state[index] = {key: self._slice(key, value, parameter.position) for key, value in state[index].items()}
        return {**state_dict, "state": state}


def _is_slice(value: Any, parameter: SteppedParameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _like(state: Any) -> Any:
    """An empty mapping of the kind that optimizers use."""
    return type(state)(state.default_factory) if hasattr(state, "default_factory") else type(state)()
