"""Checks of ``attach``: those that other folders register, all of which it asks, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.ddp.synchronizer import Synchronizer

__all__ = ["Optimizers", "attachers", "before_averaging", "before_dear", "check_dense", "shown", "stepped_by"]

Optimizers = tuple[torch.optim.Optimizer, ...]

# Called with the model and each of its optimizers; what must not be attached raises.
before_averaging: list[Callable[[nn.Module, torch.optim.Optimizer], None]] = []
# Also with the form, "sharded" or "replicated".
before_dear: list[Callable[[nn.Module, torch.optim.Optimizer, str], None]] = []
# By a backend's name: what attaches its models in the place of ``attach``, which has checked model and optimizers.
attachers: dict[str, Callable[[DistributedDataParallel, Optimizers], Synchronizer]] = {}


def stepped_by(optimizers: Optimizers) -> Iterator[torch.Tensor]:
    """What they step, parameter by parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def check_dense(what: str, name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor whose elements do not fill its memory, each a place of its own."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise TypeError(
            f"torchext.attach: {what} {name!r} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, "
            "and shares or skips memory; make it dense with .contiguous()"
        )


def shown(names: list[str]) -> str:
    """The first three names, for an error."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
