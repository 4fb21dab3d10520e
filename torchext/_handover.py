"""What a worker that joins gets from the first of those that train: its model and its optimizer's state, as bytes."""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
from torch import nn

__all__ = ["pack", "unpack"]


def pack(module: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The state of both, on the CPU."""
    buffer = io.BytesIO()
    torch.save([module.state_dict(), _plain(optimizer.state_dict())], buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpack(state: torch.Tensor, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads what :func:`pack` has made of another worker's."""
    of_module, of_optimizer = torch.load(io.BytesIO(bytes(state.numpy())), weights_only=True)
    module.load_state_dict(of_module)
    optimizer.load_state_dict(of_optimizer)


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
