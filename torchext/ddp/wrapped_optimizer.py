"""Optimizers that stand in front of the one that steps: those of training frameworks."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["unwrapped"]

# By name, as their packages need not be there: the wrapper, and its attribute that is the optimizer.
_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "_optimizer", "_FabricOptimizer": "_optimizer"}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer whose ``step()`` such a wrapper calls; anything else as it is.

    A wrapper passes for an optimizer (``isinstance``), but a hook on it may never be called, or cannot be set, and its
    type says nothing about how it steps.
    """
    while (name := _attribute_of(optimizer)) is not None:
        inner = vars(optimizer).get(name)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            return optimizer
        optimizer = inner
    return optimizer


def _attribute_of(optimizer: Any) -> str | None:
    return next((_WRAPPERS[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _WRAPPERS), None)
