"""What is done to gradients between a backward pass and the step, where plain all-reduce has averaged them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel.distributed import _find_tensors

__all__ = ["GradientWatch"]


class GradientWatch:
    """Tells whether a parameter's own gradient was changed after the backward pass.

    While "dear" trains by plain all-reduce such a change would count, and with the next plan it would be lost. It is
    refused in both, so that a script fails in its first step or never. (In the exchanges of "dear" the C++ side looks.)
    A detached gradient has a version of its own: what is done through one is not seen.

    Args:
        named: The model's parameters that "dear" trains, by name.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._named = named
        self._left: dict[str, tuple[int, int]] = {}  # where each gradient was, and its version

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def follow(self, output: Any) -> None:
        """After a forward pass: the backward pass through this output will be noted when it is over."""
        found = _find_tensors(output)  # type: ignore[no-untyped-call]
        tensors = [tensor for tensor in found if tensor.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, self._begins, mode="any")

    def check(self) -> None:
        """Raises RuntimeError for the first gradient that was changed since it was noted."""
        for name, (place, version) in self._left.items():
            gradient = self._named[name].grad
            if gradient is not None and gradient.data_ptr() == place and gradient._version != version:
                raise RuntimeError(
                    f"dear: the gradient of {name} was changed after the backward pass, which would count in plain "
                    "all-reduce steps as this one only, and be lost in others; clip with sync.clip_grad_norm_(), and "
                    "change others through optimizer.param_groups"
                )

    def forget(self) -> None:
        """What has been noted does not matter any more."""
        self._left.clear()

    def _begins(self, _: torch.Tensor) -> None:
        self._queue(2)

    def _queue(self, more: int) -> None:
        # DDP's own last act is queued behind this one, or, with a static graph, by something that is.
        callback = functools.partial(self._queue, more - 1) if more else self._note
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _note(self) -> None:
        self._left = {
            name: (parameter.grad.data_ptr(), parameter.grad._version)
            for name, parameter in self._named.items()
            if parameter.grad is not None and not parameter.grad.is_sparse
        }
