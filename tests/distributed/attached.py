"""What the tests of attached models share: a small regression, a Trainer over it, and looks at all ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

ORDERS = ("atc", "cta")


OPTIONS = {
    "prague": torchext.PragueOptions,
    "dssync": torchext.DSSyncOptions,
    "hop": torchext.HopOptions,
    "dear": torchext.DeAROptions,
    "torchext": torchext.DeAROptions,
}


def new_group(backend: str, ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """A group with options of its own; collective of the whole world."""
    return dist.new_group(ranks, timeout=timedelta(seconds=30), backend=backend, pg_options=OPTIONS[backend](**options))


def at_once(backend: str, **options: Any) -> Any:
    """Options of a group; with "dear" its own from the first step on, and no trial of plain all-reduce."""
    return OPTIONS[backend](**({"allreduce_fallback": False} if backend == "dear" else {}), **options)


def prague(**options: Any) -> dist.ProcessGroup:
    return new_group("prague", **options)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


class Normalized(nn.Module):
    """Has buffers, which workers average too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(inputs))


def batch(rank: int, step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.rand(rows, 8, generator=generator) * 2 - 1
    return inputs, torch.tanh(inputs[:, :4].sum(1, keepdim=True)) + 0.5 * inputs[:, 4:5]


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def everywhere(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """What every rank passed, stacked."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


def equal_everywhere(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    all_ = everywhere(flat(module), group)
    assert (all_ == all_[0]).all(), (all_ - all_[0]).abs().max()


class Trainer:
    """A small regression on one rank, attached."""

    def __init__(
        self,
        rank: Rank,
        *,
        model: nn.Module | None = None,
        lr: float = 0.1,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        ddp: dict[str, Any] | None = None,
        bucket_mb: float = 0.001,
        backend: str = "prague",
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.rank = rank.rank
        self.group = group if group is not None else new_group(backend, **options)
        self.module = model if model is not None else mlp()
        self.ddp = DistributedDataParallel(self.module, process_group=self.group, **(ddp or {}))
        self.optimizer = optimizer(self.ddp.parameters(), lr=lr)
        whole = torchext.backend_of(self.group).name() == "hop"
        self.sync = torchext.attach(self.ddp, self.optimizer, bucket_mb="auto" if whole else bucket_mb)
        self.step_count = 0

    def loss(self, step: int | None = None) -> torch.Tensor:
        inputs, targets = batch(self.rank, self.step_count if step is None else step)
        return nn.functional.mse_loss(self.ddp(inputs), targets)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        return float(loss.detach())

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def evaluate(self) -> float:
        """The loss of the average of all models, on data that is the same on all ranks."""
        with self.sync.averaged() as module, torch.no_grad():
            inputs, targets = batch(77, 0, rows=256)
            return float(nn.functional.mse_loss(module(inputs), targets))
