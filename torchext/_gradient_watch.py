"""What is done to gradients between a backward pass and the step, which "dear" has averaged or is averaging."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.weak import TensorWeakRef

from torchext._uncompiled import uncompiled

__all__ = ["GradientWatch"]


class GradientWatch:
    """Tells whether a parameter's own gradient was changed, replaced or dropped after the backward pass.

    While "dear" trains by plain all-reduce that would count, and in its exchanges it would be lost. It is refused in
    both, so that a script fails in its first step or never. (In the exchanges the C++ side looks, too, and first: it
    has each gradient's version from the end of the backward pass.)
    A detached gradient has a version of its own: what is done through one is not seen.

    Args:
        named: The model's parameters that "dear" trains, by name.
        begins: To be called when the backward pass of an output begins, inside it.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], begins: Callable[[], None]) -> None:
        self._on_begin = begins
        self._names = {parameter: name for name, parameter in named.items()}
        # What each parameter was left with: its gradient, if it had one, and that one's version.
        self._left: dict[nn.Parameter, tuple[TensorWeakRef | None, int]] = {}

    @uncompiled("dear looks at the outputs of forward passes")
    def follow(self, output: Any) -> None:
        """After a forward pass: the backward pass through this output will be noted when it is over."""
        found = _find_tensors(output)  # type: ignore[no-untyped-call]
        tensors = [tensor for tensor in found if tensor.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, self._begins, mode="any")

    def check(self) -> None:
        """Raises RuntimeError for the first gradient that is not what was noted."""
        for parameter, (reference, version) in self._left.items():
            gradient = parameter.grad
            if gradient is None:
                what = None if reference is None else "dropped"
            elif reference is None or gradient is not reference():
                what = "replaced"
            else:
                what = "changed" if gradient._version != version else None
            if what:
                raise RuntimeError(
                    f"dear: the gradient of {self._names[parameter]} was {what} after the backward pass, which would "
                    "count in steps by plain all-reduce only, and be lost in others; clip with sync.clip_grad_norm_(), "
                    "drop all of them with optimizer.zero_grad(), and change others through optimizer.param_groups"
                )

    def forget(self, parameter: nn.Parameter | None = None) -> None:
        """What has been noted, of one parameter or of all, does not matter any more."""
        if parameter is None:
            self._left.clear()
        else:
            self._left.pop(parameter, None)

    def _begins(self, _: torch.Tensor) -> None:
        self._on_begin()
        self._queue(2)

    def _queue(self, more: int) -> None:
        # DDP's own last act is queued behind this one, or, with a static graph, by something that is.
        callback = functools.partial(self._queue, more - 1) if more else self._note
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _note(self) -> None:
        self._left.clear()
        for parameter in self._names:
            gradient = parameter.grad
            if gradient is None:
                self._left[parameter] = None, 0
            elif not gradient.is_sparse:
                self._left[parameter] = TensorWeakRef(gradient), gradient._version
