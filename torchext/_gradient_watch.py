"""What is done to gradients between a backward pass and the step, which "dear" has averaged or is averaging."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.weak import TensorWeakRef

from torchext._dear_refusals import NOT_AVERAGED
from torchext._uncompiled import uncompiled

__all__ = ["GradientWatch", "Mark", "is_marked"]


# A gradient, or none, and its version; instead of both None: nothing is known, or it need not stay.
Mark = tuple[TensorWeakRef | None, int] | None


class GradientWatch:
    """Tells whether a parameter's own gradient was changed, replaced or dropped after the backward pass.

    While "dear" trains by plain all-reduce that would count, and in its exchanges it would be lost. It is refused in
    both, so that a script fails in its first step or never. (In the exchanges the C++ side looks, too, and first: it
    has each gradient's version from the end of the backward pass.)
    A detached gradient has a version of its own: what is done through one is not seen.

    For the same reason it tells whether a step would be with gradients that were not averaged since the last one, as
    plain all-reduce would do it.

    Args:
        named: The model's parameters that "dear" trains, by name.
        begins: To be called when the backward pass of an output begins, inside it.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], begins: Callable[[], None]) -> None:
        self._on_begin = begins
        self.parameters: Sequence[nn.Parameter] = list(named.values())
        """In the order of all marks."""
        # Of every step: lists, since a tensor as a key of a dict is hashed in Python.
        self._names = list(named)
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._left: list[Mark] = []  # what each was left with, and must have until forgotten; empty: nothing
        self._known: list[Mark] = [None] * len(self._names)  # the same, until there is something else
        self._before: list[Mark] | None = None  # what each had in front of passes inside no_sync()
        self._in_front: dict[int, torch.Tensor] = {}  # of the forward pass under way: the gradients
        self._averages = True  # the last forward pass was outside no_sync()
        self._new = False  # there was a backward pass since the last step
        self._apart = False  # and the last that reached a parameter was inside no_sync()

    def enter_forward(self) -> None:
        """A forward pass begins, in which DDP may move gradients to other buckets; :meth:`leave_forward` ends it."""
        self._in_front = {place: p.grad for place, p in enumerate(self.parameters) if p.grad is not None}

    def leave_forward(self) -> None:
        """What has been noted of gradients that DDP has moved is true of where they are now."""
        gradients = [(place, before, self.parameters[place].grad) for place, before in self._in_front.items()]
        moved = {place: before for place, before, now in gradients if now is not None and now is not before}
        self._in_front = {}
        if not moved:
            return
        now = self.marks()
        for marks in filter(None, (self._left, self._known, self._before)):
            for place, before in moved.items():
                if is_marked(before, marks[place]):
                    marks[place] = now[place]

    @uncompiled("dear looks at the outputs of forward passes")
    def follow(self, output: Any, averages: bool) -> None:
        """After a forward pass: the backward pass through this output will be noted when it is over.

        Args:
            output: Of the model.
            averages: Whether the pass was outside no_sync().
        """
        found = _find_tensors(output)  # type: ignore[no-untyped-call]
        tensors = [tensor for tensor in found if tensor.requires_grad]
        self._averages = averages
        if averages:
            self._before = None
        elif self._before is None:
            self._before = self.marks()
        if tensors:
            register_multi_grad_hook(tensors, self._begins, mode="any")

    def check(self) -> None:
        """Raises RuntimeError for the first gradient that is not what was noted."""
        for place, mark in enumerate(self._left):
            parameter = self.parameters[place]
            if mark is None or is_marked(parameter.grad, mark):
                continue
            if parameter.grad is None:
                what = "dropped"
            else:
                reference = mark[0]
                what = "replaced" if reference is None or parameter.grad is not reference() else "changed"
            raise RuntimeError(
                f"dear: the gradient of {self._names[place]} was {what} after the backward pass, which would "
                "count in steps by plain all-reduce only, and be lost in others; clip with sync.clip_grad_norm_(), "
                "drop all of them with optimizer.zero_grad(), and change others through optimizer.param_groups"
            )

    def check_averaged(self) -> None:
        """Raises RuntimeError if there are gradients, and they are not new or not averaged. For a step that begins."""
        if self._new and not self._apart:
            return
        own = [(p.grad, known) for p, known in zip(self.parameters, self._known, strict=True) if p.grad is not None]
        if own and (self._apart or all(is_marked(gradient, known) for gradient, known in own)):
            raise RuntimeError(NOT_AVERAGED)

    def forget(self, parameter: nn.Parameter | None = None) -> None:
        """What has been noted, of one parameter or of all, need not stay."""
        if parameter is None:
            self._left = []
        elif self._left:
            self._left[self._place[id(parameter)]] = None

    def used(self, zeroed: bool = False) -> None:
        """A step is over, or gradients have been cleared; ``zeroed``: by zeros."""
        self.forget()
        self._new = self._apart = False
        self._before = None if self._averages else self.marks()
        if zeroed:
            self._known = self.marks()

    def _begins(self, _: torch.Tensor) -> None:
        self._on_begin()
        self._queue(2)

    def _queue(self, more: int) -> None:
        # DDP's own last act is queued behind this one, or, with a static graph, by something that is.
        callback = functools.partial(self._queue, more - 1) if more else self._note
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _note(self) -> None:
        self._known = self.marks()
        self._left = list(self._known)
        if self._averages or self._before is None:
            self._new, self._apart = True, False
        elif any(
            mark is not None and not is_marked(parameter.grad, mark)
            for parameter, mark in zip(self.parameters, self._before, strict=True)
        ):
            self._new = self._apart = True  # else it was for gradients of inputs

    def marks(self) -> list[Mark]:
        """The gradients as they are; of sparse ones nothing."""
        marks: list[Mark] = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                marks.append((None, 0))
            else:
                marks.append(None if gradient.is_sparse else (TensorWeakRef(gradient), gradient._version))
        return marks


def is_marked(gradient: torch.Tensor | None, mark: Mark) -> bool:
    """Whether it is known to be what was marked, unchanged."""
    if mark is None:
        return False
    reference, version = mark
    if gradient is None or reference is None:
        return gradient is None and reference is None
    return gradient is reference() and gradient._version == version
