"""The state that an optimizer keeps for a pool, slot by slot: it moves with the chunks."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchext._dear_parameter import SteppedParameter, stood_for

if TYPE_CHECKING:
    from torchext.nn._table import AdaptiveTable

__all__ = ["expect_other_size", "find_pool", "moving_state"]

_resized: weakref.WeakSet[AdaptiveTable] = weakref.WeakSet()  # at any time
_unchecked: weakref.WeakSet[AdaptiveTable] = weakref.WeakSet()  # and since then nothing has stepped them
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def find_pool(optimizer: torch.optim.Optimizer, pool: nn.Parameter) -> nn.Parameter:
    """The pool among the optimizer's parameters, or what "dear" steps in its place.

    Raises:
        ValueError: The optimizer does not train the pool.
    """
    for group in optimizer.param_groups:
        for held in group["params"]:
            if stood_for(held) is pool:
                return held  # type: ignore[no-any-return]
    raise ValueError(
        f"optimizer = {type(optimizer).__name__}: a pool is not among its parameters; pass the optimizer that trains "
        "the pools (where several do, make a ChunkPruner for each), so that its state moves with the chunks"
    )


def moving_state(optimizer: torch.optim.Optimizer, pool: nn.Parameter) -> tuple[dict[str, Any], list[str]]:
    """The optimizer's state of a pool, and which of it has an element for each of the pool's.

    Raises:
        ValueError: The optimizer does not train the pool, or has state that cannot move with its chunks.
    """
    held = find_pool(optimizer, pool)
    if isinstance(held, SteppedParameter):
        held.held_by.wait()  # for the last step, or it would be done with other chunks
    state: dict[str, Any] = optimizer.state.get(held, {})
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    moving = [name for name, value in tensors.items() if value.shape == pool.shape]
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
        if not _trains(optimizer, table):
            continue
        _watch_loads(optimizer)
        for name, value in optimizer.state.get(table.pool, {}).items():
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
