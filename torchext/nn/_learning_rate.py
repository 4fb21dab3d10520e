"""The learning rate of a fused update follows the optimizer that has the table's group."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from torchext.nn._table import AdaptiveTable

__all__ = ["track_optimizer_lr"]

_tracking: weakref.WeakSet[AdaptiveTable] = weakref.WeakSet()


def track_optimizer_lr(table: AdaptiveTable) -> None:
    """From now on looks for the table's group in every optimizer that steps."""
    _tracking.add(table)


def _take_over(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Schedulers write in place, but ``load_state_dict`` puts other tensors into groups, and people put numbers."""
    for table in list(_tracking):
        for group in optimizer.param_groups:
            if group.get("lr") is not table.lr and any(held is table.trigger for held in group["params"]):
                table.lr = group["lr"]
                group["lr"] = table.lr


register_optimizer_step_pre_hook(_take_over)
