"""A warning where a script saves or evaluates its own replica, and seems to take it for the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.base.eager_only import eager_only
from torchext.ddp.forward_hooks import Hook
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
        self._remedy = "`with sync.averaged():` around it, on every rank"
        self._module = ddp.module
        hook = Hook(self._look)
        scripted = isinstance(ddp.module, torch.jit.ScriptModule)  # takes no such hook
        module: nn.Module = ddp if scripted else ddp.module
        self._handles: list[Any] = [
            module.register_state_dict_pre_hook(hook),  # type: ignore[no-untyped-call]
            *(optimizer.register_state_dict_pre_hook(hook) for optimizer in optimizers),
        ]

    def advise(self, remedy: str) -> None:
        """From now on warnings name another remedy, and the first evaluation of a replica warns, too.

        Args:
            remedy: What a script that has no synchronizer in hand writes.
        """
        self._remedy = remedy
        if not isinstance(self._module, torch.jit.ScriptModule):
            self._evaluation = self._module.register_forward_pre_hook(Hook(self._look_at_evaluation))
            self._handles.append(self._evaluation)

    def _look(self) -> None:
        if self._told or _unnoticed or not self._differ():
            return
        self._told = True
        warnings.warn(
            "torchext: state_dict() between averages: it is this worker's own replica, and the others have theirs. "
            f"Save what is the same on all workers: {self._remedy}",
            ReplicaWarning,
            stacklevel=4,
        )

    @eager_only("torchext: the forward pass of an evaluation is looked at")
    def _look_at_evaluation(self) -> None:
        if self._module.training or torch.is_grad_enabled() or not self._differ():
            return
        self._evaluation.remove()
        warnings.warn(
            "torchext: an evaluation between averages: it is of this worker's own replica, and the others have theirs. "
            f"Evaluate what is the same on all workers: {self._remedy}",
            ReplicaWarning,
            stacklevel=4,
        )

    def remove(self) -> None:
        """Takes the hooks off. Safe twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
