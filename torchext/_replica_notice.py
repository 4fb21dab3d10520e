"""A warning where a script saves its own replica, and seems to take it for the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext._forward_hooks import Hook
from torchext.errors import ReplicaWarning

__all__ = ["ReplicaNotice", "unnoticed"]

_unnoticed = 0


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Inside, states are read for another purpose."""
    global _unnoticed
    _unnoticed += 1
    try:
        yield
    finally:
        _unnoticed -= 1


class ReplicaNotice:
    """Warns at the first ``state_dict()`` of a model or its optimizers that other workers have differently.

    Args:
        ddp: The model.
        optimizers: Step it.
        differ: Whether replicas differ now.
    """

    def __init__(
        self, ddp: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer], differ: Callable[[], bool]
    ) -> None:
        self._differ = differ
        self._told = False
        hook = Hook(self._look)
        scripted = isinstance(ddp.module, torch.jit.ScriptModule)  # takes no such hook
        module: nn.Module = ddp if scripted else ddp.module
        self._handles: list[Any] = [
            module.register_state_dict_pre_hook(hook),  # type: ignore[no-untyped-call]
            *(optimizer.register_state_dict_pre_hook(hook) for optimizer in optimizers),
        ]

    def _look(self) -> None:
        if self._told or _unnoticed or not self._differ():
            return
        self._told = True
        warnings.warn(
            "torchext: state_dict() between averages: it is this worker's own replica, and the others have theirs. "
            "Save what is the same on all workers: `with sync.averaged():` around it, on every rank",
            ReplicaWarning,
            stacklevel=4,
        )

    def remove(self) -> None:
        """Takes the hooks off. Safe twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
