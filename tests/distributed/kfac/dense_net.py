"""A model of Linear layers only, and how the tests of directions of rows train it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import Rank
from kfac_net import OPTIONS, ROWS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC

STEPS = 8  # of which 0, 3 and 6 make inverses


class Dense(nn.Module):
    """Linear layers only, one of which is called in some batches."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(10, 40)
        self.seldom = nn.Linear(40, 40)
        self.head = nn.Linear(40, 3)
        self.to(dtype)

    def forward(self, inputs: Tensor, seldom: bool = True) -> Tensor:
        x = torch.tanh(self.first(inputs))
        return self.head(torch.tanh(self.seldom(x)) if seldom else x)  # type: ignore[no-any-return]


def batch(step: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 10, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def check_plan(optimizer: KFAC, *, split: bool, shared: bool) -> None:
    """What was asked for is done: directions are split, and memory is shared."""
    plan = optimizer.plan().as_dict
    several = plan["ranks"] > 1
    assert (plan["split_directions"], plan["sharing"] is not None) == (split and several, shared and several)


ROW_OPTIONS: dict[str, Any] = OPTIONS | {"strategy": "spd", "shared_memory": False, "split_directions": False}


def steps(rank: Rank, count: int, *, ddp: bool = True, timeout: float = 20) -> tuple[Any, KFAC]:
    if not dist.is_initialized():
        rank.init("gloo", timeout=timeout)
    model = DistributedDataParallel(Dense()) if ddp else Dense()
    optimizer = KFAC(model, gather_rows=True, **ROW_OPTIONS)
    for step in range(count):
        backward(model, optimizer, step, rank)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: Any, optimizer: KFAC, step: int, rank: Rank) -> None:
    optimizer.zero_grad()
    model(batch(step).chunk(rank.size)[rank.rank]).square().mean().backward()
