"""A table and its optimizer share state that moves with the chunks, and the learning rate of a fused update."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from torchext.nn.adaptive_table import AdaptiveTable

__all__ = ["check_optimizer", "expect_other_size", "moving_state", "track_optimizer_lr"]

_tracking: weakref.WeakSet[AdaptiveTable] = weakref.WeakSet()  # of a fused update
_resized: weakref.WeakSet[AdaptiveTable] = weakref.WeakSet()  # at any time
_unchecked: weakref.WeakSet[AdaptiveTable] = weakref.WeakSet()  # and since then nothing has stepped them
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _held(optimizer: torch.optim.Optimizer, pool: nn.Parameter) -> nn.Parameter | None:
    """The pool, if it is among the optimizer's parameters."""
    for group in optimizer.param_groups:
        for held in group["params"]:
            if held is pool:
                return held
    return None


def _state_of(optimizer: torch.optim.Optimizer, held: nn.Parameter) -> dict[str, Any]:
    """What the optimizer keeps for one of its parameters."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        optimizer = optimizer.optim  # keeps it on the rank that steps the parameter; the others have none to move
    return optimizer.state.get(held, {})  # type: ignore[no-any-return]


def check_optimizer(optimizer: torch.optim.Optimizer | None, table: AdaptiveTable) -> None:
    """Whether the state of a table that an optimizer trains can move with its chunks at all.

    Raises:
        ValueError: There is no optimizer, or one that does not train the pool.
    """
    if not table.optimizer_trains:
        return
    if optimizer is None:
        raise ValueError("optimizer: an optimizer trains the pools; pass it, so that its state moves with the chunks")
    if _held(optimizer, table.pool) is None:
        raise ValueError(
            f"optimizer = {type(optimizer).__name__}: a pool is not among its parameters; pass the optimizer that "
            "trains the pools (where several do, make a ChunkPruner for each), so that its state moves with the chunks"
        )


def _beginnings(optimizer: torch.optim.Optimizer, held: nn.Parameter) -> dict[str, float]:
    """What torch's optimizers fill a parameter's new state with, where that is not 0.

    Rprop would leave a chunk whose steps begin with 0 where it is.
    """
    (group,) = (group for group in optimizer.param_groups if any(own is held for own in group["params"]))
    if "initial_accumulator_value" in group:
        return {"sum": float(group["initial_accumulator_value"])}  # Adagrad
    if "step_sizes" in group:
        return {"step_size": float(group["lr"])}  # Rprop
    return {}


def moving_state(
    optimizer: torch.optim.Optimizer | None, table: AdaptiveTable
) -> tuple[dict[str, Any], dict[str, float]]:
    """The optimizer's state of a pool; which of it has an element for each of the pool's, and its value to begin with.

    A pool that is frozen now has the state of when it was trained.

    Raises:
        ValueError: The optimizer does not train the pool, or has state that cannot move with its chunks.
    """
    if optimizer is None:
        return {}, {}
    check_optimizer(optimizer, table)
    pool, held = table.pool, _held(optimizer, table.pool)
    if held is None:
        return {}, {}
    state = _state_of(optimizer, held)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    beginnings = _beginnings(optimizer, held)
    moving = {name: beginnings.get(name, 0.0) for name, value in tensors.items() if value.shape == pool.shape}
    for name, value in tensors.items():
        if name not in moving and (value.numel() > 1 or held.shape != pool.shape):
            raise ValueError(
                f"optimizer: state {name!r} has shape {tuple(value.shape)}, the pool {tuple(pool.shape)}: it cannot "
                "move with the chunks. With 'dear' take DeAROptions(form='replicated'); else an optimizer whose state "
                "has a value for each element, or that has none, or training='fused' or 'sharded'"
            )
    return state, moving


def expect_other_size(table: AdaptiveTable) -> None:
    """The pool's size has changed: what steps it next must have state of that size, or none."""
    _resized.add(table)
    _unchecked.add(table)
    _watch_steps()


@functools.cache
def _watch_steps() -> None:  # of all optimizers; only where there is something to see
    register_optimizer_step_pre_hook(_check_size)


def _check_size(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for table in list(_unchecked):
        if not table.pool.requires_grad or not _trains(optimizer, table):
            continue  # frozen: is not stepped, and may be thawed
        _watch_loads(optimizer)
        for name, value in _state_of(optimizer, table.pool).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 1 and len(value) != len(table.pool):
                raise ValueError(
                    f"optimizer: state {name!r} is of {len(value)} slots, the table has a pool of {len(table.pool)} "
                    "since it took a checkpoint with another budget or was pruned; load table and optimizer from one "
                    "checkpoint, or make a new optimizer"
                )
        _unchecked.discard(table)


def _watch_loads(optimizer: torch.optim.Optimizer) -> None:
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_loaded)


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    # No error yet: the table's part of the checkpoint may be loaded after the optimizer's.
    _unchecked.update(table for table in list(_resized) if _trains(optimizer, table))


def _trains(optimizer: torch.optim.Optimizer, table: AdaptiveTable) -> bool:
    return any(held is table.pool for group in optimizer.param_groups for held in group["params"])


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
