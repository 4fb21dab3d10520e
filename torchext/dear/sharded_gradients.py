"""Averaged gradients in the sharded form of "dear", of which each rank has slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext.ddp.under_way import own_gradient, set_own_gradient
from torchext.dear.averaged_gradients import AveragedGradients
from torchext.dear.sliced_gradient import SlicedGradient
from torchext.dear.spent_gradients import SpentGradients
from torchext.dear.state_slices import StateSlices

__all__ = ["ShardedGradients"]

_CHANGED_BETWEEN = (
    "dear: averaged gradients were changed between two backward passes of one forward pass, so the change would be "
    "lost; change them after the last pass, or take DeAROptions(form='replicated')"
)


class ShardedGradients(AveragedGradients):
    """This rank's slices of averaged gradients, as the :class:`SliceOwner` of what ``parameter.grad`` is.

    The parameters' own gradients stay this rank's. A step uses slices up. Then ``parameter.grad`` has nothing to give,
    until the next pass that averages. :meth:`accumulating`, too, is called on autograd's thread.

    Args:
        core: The C++ synchronizer.
        parameters: The model's, in registration order.
        released: See :class:`AveragedGradients`.
        group: To gather gradients over.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        parameters: Sequence[nn.Parameter],
        released: Callable[[Iterable[int]], None],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(core, parameters, released)
        self._group = group
        self._slices = StateSlices(parameters, group)
        self._spent = SpentGradients(parameters, group)
        self._sliced: dict[int, SlicedGradient] = {}
        self._changed = False  # some slice, since the backward pass
        self._norms: dict[float, dict[int, torch.Tensor]] = {}  # by order, of all gradients as they are

    # ---- Between passes and steps ----

    def stands_in(self, position: int) -> bool:
        return position in self or position in self._spent

    def renew(self, positions: Iterable[int]) -> None:
        self._spent.clear()
        super().renew(positions)

    def drop(self, positions: Iterable[int] | None = None) -> None:
        dropped = list(self._positions) if positions is None else list(positions)
        for position in dropped:
            if (sliced := self._sliced.pop(position, None)) is not None and sliced.settled is None:
                sliced.gone = True
        self._norms.clear()
        super().drop(dropped)
        self._changed = self._changed and bool(self._positions)

    def accumulating(self) -> None:
        """Another pass adds to the parameters' own gradients, of which the averaged ones are made."""
        if self._changed:
            raise RuntimeError(_CHANGED_BETWEEN)
        self.drop()

    def before_pass(self) -> None:
        if self._changed:
            self.settle_all()

    def before_use(self, positions: Iterable[int]) -> None:
        pass  # a pass adds to the parameters' own

    def own_slice(self, position: int) -> torch.Tensor | None:
        """This rank's part of the gradient to step with."""
        if position in self:
            part = self._core.own_gradient(position)
            if part is not None:
                self._spent.use(position)
            return part
        gradient = own_gradient(self._parameters[position])
        return None if gradient is None else self._core.own_slice_of(position, gradient)

    def spend(self, positions: Iterable[int] | None = None) -> None:
        """A step has used what has been averaged of these or of all, and the slices are there no more."""
        self._spent.end_step(self._positions, positions is None, self._changed)
        if self._changed:
            self._core.note_lost_change()
        self.drop(positions)

    def forget_spent(self, positions: Iterable[int]) -> None:
        self._released(self._spent.discard(positions))

    def restore(self) -> None:
        super().restore()
        self._spent.restore()

    def settle_all(self) -> None:
        parts = self._parts()
        with _on_all_ranks():
            whole = self._slices.whole({position: {"grad": part} for position, part in parts.items()})
        for position in self._positions:
            gradient = whole[position]["grad"] if position in whole else None
            set_own_gradient(self._parameters[position], gradient)
            if position in self._sliced:
                self._sliced[position].settled = gradient
        self.drop()

    # ---- parameter.grad ----

    def gradient(self, position: int) -> torch.Tensor | None:
        parameter = self._parameters[position]
        if position not in self:
            spent = SlicedGradient(self, position, parameter.new_empty(0), parameter)
            spent.gone = True
            return spent
        if position not in self._sliced:
            part = self._core.own_gradient(position)
            if part is None:
                return None
            self._sliced[position] = SlicedGradient(self, position, part, parameter)
        return self._sliced[position]

    def replace(self, position: int, value: torch.Tensor | None) -> None:
        self.forget_spent([position])
        if isinstance(value, SlicedGradient):
            if value is self._sliced.get(position):
                return  # changed in place
            value = value.clone()  # raises where it is gone
        if position in self:
            self._core.own_gradient(position)  # sent, before its memory may go
            self.drop([position])
        set_own_gradient(self._parameters[position], value)

    def _zero(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if gradient.grad_fn is None:
            gradient.requires_grad_(False)  # a view of DDP's buckets cannot be detached in place
        else:
            gradient.detach_()
        gradient.zero_()

    # ---- As a SliceOwner, which says what these do ----

    def slice_of(self, position: int, whole: torch.Tensor) -> torch.Tensor:
        return self._core.own_slice_of(position, whole)

    def changed(self, position: int, zeroed: bool) -> None:
        self._norms.clear()
        self.forget_spent([position])
        own = own_gradient(self._parameters[position])
        if not zeroed:
            self._changed = True
        elif own is not None:
            own.data.zero_()  # what the next pass adds to; its version tells of scripts that keep references

    def norm(self, position: int, order: float) -> torch.Tensor:
        if order not in self._norms:  # of all gradients at once, so that one all-reduce serves them all
            self._norms[order] = _norms_of(self._parts(), order, self._group)
        return self._norms[order][position].clone()

    def any_rank(self, flag: torch.Tensor) -> None:
        with _on_all_ranks():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)

    def whole(self, position: int) -> torch.Tensor:
        self.settle_all()
        gradient = own_gradient(self._parameters[position])
        assert gradient is not None  # some rank has one, of which there is a slice
        return gradient

    def _parts(self) -> dict[int, torch.Tensor]:
        """The slices of all averaged gradients that some rank has, in the same order on all ranks."""
        found = ((position, self._core.own_gradient(position)) for position in sorted(self._positions))
        return {position: part for position, part in found if part is not None}


def _norms_of(parts: Mapping[int, torch.Tensor], order: float, group: dist.ProcessGroup) -> dict[int, torch.Tensor]:
    """The norms of gradients of which these are this rank's slices. Collective."""
    infinite = order == float("inf")
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts.values()) else torch.float32
    # A rank's part may be empty, of which there is no largest element.
    own = [
        torch.linalg.vector_norm(part, order, dtype=dtype) if part.numel() else part.new_zeros((), dtype=dtype)
        for part in parts.values()
    ]
    norms = torch.stack(own)
    norms = norms if infinite else norms**order
    with _on_all_ranks():
        dist.all_reduce(norms, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    norms = norms if infinite else norms ** (1.0 / order)
    return {position: norm.to(part.dtype) for (position, part), norm in zip(parts.items(), norms, strict=True)}


@contextlib.contextmanager
def _on_all_ranks() -> Iterator[None]:
    """Inside, all ranks look at gradients in slices; where some do not come, the others are told what it was."""
    try:
        yield
    except dist.DistBackendError as error:
        raise type(error)(
            "dear: gradients are in slices in the sharded form, and to look at them is collective: do it on every "
            f"rank, or take DeAROptions(form='replicated') ({error})"
        ) from error
