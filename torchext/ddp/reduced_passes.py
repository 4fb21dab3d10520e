"""Tells when DDP has averaged the gradients of a backward pass, which all ranks do equally often and in one order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchext.base.eager_only import eager_only
from torchext.ddp.forward_hooks import Hook
from torchext.ddp.synchronizer import ignored_parameters

__all__ = ["ReducedPasses"]


class ReducedPasses:
    """Calls a function at the end of each backward pass whose gradients DDP has averaged.

    Ranks may take different steps, and make different forward passes and passes inside ``no_sync()``. They average
    together, or DDP would wait forever. So what is counted here is equal on all ranks, and the function may be
    collective: all collectives that DDP makes in the pass are behind it.

    Args:
        ddp: The model.
        reduced: The function. It is called on autograd's thread, and what it raises is raised by ``backward()``.
    """

    def __init__(self, ddp: DistributedDataParallel, reduced: Callable[[], None]) -> None:
        self._ddp, self._reduced = ddp, reduced
        self._awaited = False  # DDP averages in the next backward pass
        self._task = -1  # of autograd, at whose end it is looked whether DDP has

        @eager_only("torchext: passes are counted")
        def leave_forward() -> None:
            if torch.is_grad_enabled() and ddp.require_backward_grad_sync:  # as DDP asks, behind its forward pass
                self._awaited = True

        ignored = ignored_parameters(ddp)
        self._handles: list[RemovableHandle] = [ddp.register_forward_hook(Hook(leave_forward))]
        for parameter in ddp.module.parameters():
            if parameter.requires_grad and id(parameter) not in ignored:
                hook = parameter.register_post_accumulate_grad_hook(Hook(self._gradient_ready))
                self._handles.append(hook)

    def remove(self) -> None:
        """The function is not called any more. Safe twice, and inside of it."""
        self._awaited = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _gradient_ready(self) -> None:
        if not self._awaited:
            return
        # A reentrant activation checkpoint is a task of its own. DDP has finished in the one with the last gradient.
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            at_end = torch.autograd.Variable._execution_engine.queue_callback
            at_end(lambda: at_end(self._task_ends))  # behind what DDP queues with the last gradient

    def _task_ends(self) -> None:
        if not self._awaited:
            return
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError:  # another backward pass has the other gradients
            return
        self._awaited = False
        self._reduced()
