"""The parameters of a model that is trained by "dear": when they are complete, and what their gradients are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext.ddp.under_way import Arrivals, own_gradient, set_own_gradient
from torchext.dear.sliced_gradient import SlicedGradient
from torchext.dear.state_slices import StateSlices

__all__ = ["DearParameters"]

_CHANGED_BETWEEN = (
    "dear: averaged gradients were changed between two backward passes of one forward pass, so the change would be "
    "lost; change them after the last pass, or take DeAROptions(form='replicated')"
)


class DearParameters(Arrivals):
    """Makes a model's parameters look as plain DDP has them, while values and gradients are still on their way.

    Values are under way from the step until they are used. Between a backward pass that averages and the step,
    ``parameter.grad`` is the averaged gradient. In the replicated form it is gathered then, and waited for when
    somebody looks. In the sharded form it is a :class:`SlicedGradient`.

    Args:
        core: The C++ synchronizer.
        parameters: The model's, in registration order.
        group: To gather gradients over.
        arrive: Waits for the values of the parameters at some positions.
        apart: Positions of parameters that others average: their own gradients are the averaged ones.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        arrive: Callable[[list[int]], None],
        apart: Collection[int] = (),
    ) -> None:
        super().__init__(parameters)
        self._core, self._parameters, self._group, self._wait = core, list(parameters), group, arrive
        self._trained = [position for position, p in enumerate(parameters) if p.requires_grad]
        self._exchanged = [position for position in self._trained if position not in apart]
        self._slices = None if core.replicated else StateSlices(parameters, group)
        self._values: set[int] = set()  # positions of values under way
        self._reduced: set[int] = set()  # and of averaged gradients that no step has used and no script has replaced
        # Sharded: positions of gradients that a step has used up. What a rank still has is its own.
        self._spent: set[int] = set()
        self._used: set[int] = set()  # of the step under way
        self._sliced: dict[int, SlicedGradient] = {}
        self._changed = False  # some slice, since the backward pass
        self._lost = False  # and a step has used it up since
        self._norms: dict[float, dict[int, torch.Tensor]] = {}  # by order, of all gradients as they are
        self._raw = False  # an optimizer's own zero_grad() looks, after everything has been cleared

    def __getitem__(self, position: int) -> nn.Parameter:
        return self._parameters[position]

    def position_of(self, tensor: torch.Tensor) -> int | None:
        """Of one of the model's parameters; None of others."""
        return self._positions.get(id(tensor))

    # ---- Values ----

    def expect_values(self, positions: Iterable[int] | None = None) -> None:
        """These parameters, or all, have been stepped: the results are under way."""
        stepped = self._trained if positions is None else list(positions)
        self._values.update(stepped)
        self.expect(stepped)

    def values_arrived(self, positions: Iterable[int] | None = None) -> None:
        """They have been waited for; None: all."""
        arrived = list(self._values) if positions is None else list(positions)
        self._values.difference_update(arrived)
        self._settle_others(arrived)

    def arrive_all(self, positions: Sequence[int]) -> None:  # inherited
        values = [position for position in positions if position in self._values]
        if values:
            self._wait(values)
            self.values_arrived(values)
        for position in positions:
            if self._slices is None and position in self._reduced:
                self.settle_gradient(position)  # a pass that begins would add to it

    def enter_graph(self, positions: Sequence[int]) -> None:  # inherited
        self.arrive_all(positions)
        self._spent.difference_update(positions)
        self._settle_others(positions)

    # ---- Gradients ----

    def reduced(self) -> None:
        """A backward pass that averages is over. On autograd's thread."""
        self.drop()  # of an earlier pass
        self._spent.clear()
        self._lost = False
        self._reduced = set(self._exchanged)
        self._norms.clear()
        self._changed = False
        self.expect(self._exchanged)

    def accumulating(self) -> None:
        """Sharded: another pass adds to the parameters' own gradients, of which the averaged ones are made."""
        if self._changed:
            raise RuntimeError(_CHANGED_BETWEEN)
        self.drop()

    def before_pass(self) -> None:
        """A forward pass begins whose backward pass may add to gradients that no step has used."""
        if self._changed:
            self._gather()
        elif self._slices is None:
            for position in list(self._reduced):  # or a rank without one would add nothing to what it is
                self.settle_gradient(position)

    def drop(self, positions: Iterable[int] | None = None) -> None:
        """What has been averaged counts no more, or has been used; the parameters' own gradients are what they are."""
        dropped = list(self._reduced) if positions is None else list(positions)
        self._reduced.difference_update(dropped)
        for position in dropped:
            if (sliced := self._sliced.pop(position, None)) is not None and sliced.settled is None:
                sliced.gone = True
        self._norms.clear()
        self._changed = self._changed and bool(self._reduced)
        self._settle_others(dropped)

    def spend(self, positions: Iterable[int] | None = None) -> None:
        """Sharded: a step has used what has been averaged of these or of all, and the slices are there no more."""
        used, self._used = self._used & self._reduced, set()
        self._spent = used if positions is None else self._spent | used
        if self._changed:
            self._lost = True
            self._core.note_lost_change()
        self.drop(positions)

    def settle_rest(self) -> None:
        """Makes averaged gradients that no optimizer has stepped with the parameters' own. Collective when sharded."""
        if self._reduced and self._slices is not None:
            self._gather()
        for position in list(self._reduced):
            self.settle_gradient(position)

    def restore_spent(self) -> None:
        """Makes of gradients that a step has used up what plain DDP leaves: their averages. Sharded: collective.

        Where a script has changed them before the step, the change was in the slices, and there are none instead.
        """
        if self._slices is None:
            return
        flags = torch.zeros(len(self._parameters) + 1, dtype=torch.uint8, device="cpu")
        flags[list(self._spent)] = 1
        flags[-1] = not self._lost  # ranks must not decide differently: a script may have changed one rank's alone
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._group)
        *spent, unchanged = flags.tolist()
        for position in (position for position, is_spent in enumerate(spent) if is_spent):
            parameter, own = self._parameters[position], own_gradient(self._parameters[position])
            if not unchanged:
                set_own_gradient(parameter, None)
                continue
            average = torch.zeros_like(parameter, requires_grad=False) if own is None else own.detach().clone()
            average /= self._group.size()
            dist.all_reduce(average, group=self._group)
            set_own_gradient(parameter, average)
        self._spent.clear()

    def _settle_others(self, positions: Iterable[int]) -> None:
        """Settles those of the parameters of which nothing is under way, nor stands in the gradient's place."""
        self.settle(p for p in positions if p not in self._values and p not in self._reduced and p not in self._spent)

    def is_reduced(self, position: int) -> bool:
        """Whether there is an averaged gradient to step with that is not the parameter's own."""
        return position in self._reduced

    def settle_gradient(self, position: int) -> None:
        """Makes an averaged gradient the parameter's own. Sharded: all of them, collective."""
        if self._slices is None:
            self._core.settle_gradient(position)
            self.drop([position])
        else:
            self._gather()

    def gradient(self, position: int) -> torch.Tensor | None:  # inherited
        if self._raw:
            return own_gradient(self._parameters[position])
        if position in self._reduced:
            if self._slices is not None:
                return self._slice(position)
            self.settle_gradient(position)
        elif position in self._spent:
            parameter = self._parameters[position]
            nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            spent = SlicedGradient(self, position, nothing, parameter)
            spent.gone = True
            return spent
        elif position in self._values and self._slices is None:
            self.arrive_all([position])  # the step that is under way needs it as it is
        return own_gradient(self._parameters[position])

    def set_gradient(self, position: int, value: torch.Tensor | None) -> None:  # inherited
        if position in self._reduced:
            if isinstance(value, SlicedGradient):
                if value is self._sliced.get(position):
                    return  # changed in place
                value = value.clone()
            if self._slices is None:
                self._core.settle_gradient(position)
            else:
                self._core.own_gradient(position)  # sent, before its memory may go
            self.drop([position])
        elif position in self._spent:
            self._spent.discard(position)
            self._settle_others([position])
            if isinstance(value, SlicedGradient):
                value = value.clone()  # raises: it is gone
        elif position in self._values and self._slices is None:
            self.arrive_all([position])  # the step that is under way makes the averaged gradient the own one
        set_own_gradient(self._parameters[position], value)

    @contextlib.contextmanager
    def raw_gradients(self) -> Iterator[None]:
        """Inside, ``.grad`` is the parameters' own, whatever is under way."""
        self._raw = True
        try:
            yield
        finally:
            self._raw = False

    def clear(self, set_to_none: bool, positions: Iterable[int] | None = None) -> None:
        """What ``zero_grad()`` does to these or to all, without waiting for a step that is under way."""
        cleared = range(len(self._parameters)) if positions is None else list(positions)
        self.drop(cleared)
        if not self._reduced:
            self._core.clear_gradients()
        spent = self._spent.intersection(cleared)
        self._spent.difference_update(spent)
        self._settle_others(spent)
        for parameter in map(self._parameters.__getitem__, cleared):
            gradient = own_gradient(parameter)
            if gradient is None:
                continue
            if set_to_none:
                set_own_gradient(parameter, None)
            elif self._slices is None:
                set_own_gradient(parameter, torch.zeros_like(gradient))  # the step may still need the old one
            else:
                if gradient.grad_fn is None:
                    gradient.requires_grad_(False)  # a view of DDP's buckets cannot be detached in place
                else:
                    gradient.detach_()
                gradient.zero_()

    # ---- Slices ----

    def own_slice(self, position: int) -> torch.Tensor | None:
        """Sharded: this rank's part of the gradient to step with."""
        if position in self._reduced:
            part = self._core.own_gradient(position)
            if part is not None:
                self._used.add(position)
            return part
        gradient = own_gradient(self._parameters[position])
        return None if gradient is None else self._core.own_slice_of(position, gradient)

    def slice_of(self, position: int, whole: torch.Tensor) -> torch.Tensor:
        """See :class:`SliceOwner`."""
        return self._core.own_slice_of(position, whole)

    def changed(self, position: int, zeroed: bool) -> None:
        """See :class:`SliceOwner`."""
        self._norms.clear()
        self._spent.discard(position)
        self._settle_others([position])
        own = own_gradient(self._parameters[position])
        if not zeroed:
            self._changed = True
        elif own is not None:
            own.data.zero_()  # what the next pass adds to; its version tells of scripts that keep references

    def norm(self, position: int, order: float) -> torch.Tensor:
        """See :class:`SliceOwner`. Of all gradients at once, so that one all-reduce serves them all."""
        if order not in self._norms:
            self._norms[order] = self._all_norms(order)
        return self._norms[order][position].clone()

    def any_rank(self, flag: torch.Tensor) -> None:
        """See :class:`SliceOwner`."""
        with _on_all_ranks():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)

    def whole(self, position: int) -> torch.Tensor:
        """See :class:`SliceOwner`."""
        self._gather()
        gradient = own_gradient(self._parameters[position])
        assert gradient is not None  # some rank has one, of which there is a slice
        return gradient

    def _slice(self, position: int) -> SlicedGradient | None:
        if position not in self._sliced:
            part = self._core.own_gradient(position)
            if part is None:
                return None
            self._sliced[position] = SlicedGradient(self, position, part, self._parameters[position])
        return self._sliced[position]

    def _parts(self) -> dict[int, torch.Tensor]:
        """The slices of all averaged gradients that some rank has, in the same order on all ranks."""
        found = ((position, self._core.own_gradient(position)) for position in sorted(self._reduced))
        return {position: part for position, part in found if part is not None}

    def _all_norms(self, order: float) -> dict[int, torch.Tensor]:
        parts = self._parts()
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
            dist.all_reduce(norms, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=self._group)
        norms = norms if infinite else norms ** (1.0 / order)
        return {position: norm.to(part.dtype) for (position, part), norm in zip(parts.items(), norms, strict=True)}

    def _gather(self) -> None:
        """Makes all averaged gradients the parameters' own, whole. Collective."""
        assert self._slices is not None
        states: dict[int, dict[str, Any]] = {position: {"grad": part} for position, part in self._parts().items()}
        with _on_all_ranks():
            whole = self._slices.whole(states)
        for position in self._reduced:
            gradient = whole[position]["grad"] if position in whole else None
            set_own_gradient(self._parameters[position], gradient)
            if position in self._sliced:
                self._sliced[position].settled = gradient
        self._changed = False
        self.drop()


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
