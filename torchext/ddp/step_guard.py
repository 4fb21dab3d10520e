"""Refuses steps of an attached model's parameters by an optimizer that is not attached: workers would drift apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchext.base.eager_only import eager_only

__all__ = ["refuse_other_optimizers"]


@functools.cache
def refuse_other_optimizers(active_synchronizers: Callable[[], Iterable[Any]]) -> None:
    """From now on every optimizer's step is looked at."""

    @eager_only("torchext: an optimizer's step is looked at")
    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for synchronizer in active_synchronizers():
            if synchronizer._refuses(optimizer):
                kind = type(optimizer).__name__
                attached = ", ".join(type(own).__name__ for own in synchronizer._optimizers)
                raise RuntimeError(
                    f"torchext: this {kind} steps parameters of a model that is attached with another optimizer "
                    f"({attached}), so that workers would drift apart. Step the attached one, whose param_groups take "
                    "other hyperparameters; attach several as a list; or, for another optimizer, call sync.detach(), "
                    "wrap the module in a new DistributedDataParallel, and attach both. Of an optimizer around another "
                    "one attach that whose step() the script calls"
                )

    register_optimizer_step_pre_hook(check)
