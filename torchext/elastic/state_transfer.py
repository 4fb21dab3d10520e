"""A worker that joins receives model and optimizer state from the first of those that train."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext.ddp.replica_notice import unnoticed

__all__ = ["receive", "send", "unpack"]

_logger = logging.getLogger("torchext")


def send(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int, group: dist.ProcessGroup) -> None:
    """The state of all, to a worker of the group."""
    state = _packed(module, optimizers)
    dist.send(torch.tensor([state.numel()], device="cpu"), rank, group)
    _C.fault_point("state_transfer.sending")
    dist.send(state, rank, group)


def receive() -> torch.Tensor:
    """What the first worker of the default group sends, for :func:`unpack`."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(size, 0)
    _C.fault_point("state_transfer.receiving")
    state = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.recv(state, 0)
    return state


def unpack(state: torch.Tensor, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Loads what another worker has sent. RuntimeError: there is none, or it does not fit."""
    loaded = torch.load(io.BytesIO(bytes(state.numpy())), weights_only=True, map_location="cpu")
    if isinstance(loaded, str):
        raise RuntimeError(f"that worker could not save it: {loaded}")
    of_module, passing, of_optimizers = loaded
    module.load_state_dict(of_module)
    own = _passing(module)
    for name, buffer in passing.items():
        # One that the module has made anew since, in another size, is a cache: it will do so here, too.
        if name in own and own[name].shape == buffer.shape:
            own[name].copy_(buffer)
    for optimizer, own_state in zip(optimizers, of_optimizers, strict=True):
        optimizer.load_state_dict(own_state)


def _packed(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.Tensor:
    """The state of all, on the CPU; or why it cannot be had, which is nothing to end the job for."""
    buffer = io.BytesIO()
    try:
        with unnoticed():
            states = [_plain(optimizer.state_dict()) for optimizer in optimizers]
            torch.save([module.state_dict(), _passing(module), states], buffer)
    except Exception as error:
        _logger.warning("torchext: a newcomer cannot get the model and optimizer of this worker", exc_info=True)
        buffer = io.BytesIO()
        torch.save(f"{type(error).__name__}: {error}", buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _passing(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not persistent, which are averaged like the others but are not in state_dict()."""
    passing = {}
    for prefix, child in module.named_modules():
        for name in child._non_persistent_buffers_set:
            if (buffer := child._buffers[name]) is not None:
                passing[f"{prefix}.{name}"] = buffer.detach()
    return passing


def _plain(state: Any) -> Any:
    """The same with Python's numbers for numpy's, which come from schedules, and which torch.load takes for code."""
    numpy: Any = sys.modules.get("numpy")  # else there are none
    if numpy is not None and isinstance(state, numpy.generic):
        return state.item()
    if type(state) is dict:
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    return state
