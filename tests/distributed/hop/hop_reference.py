"""What the tests of "hop" share: a Trainer on a group of its own, and the same training computed in one process."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attached import batch, flat, mlp
from harness import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

ORDERS = ("parallel", "serial")


def hop(timeout: float = 30.0, **options: Any) -> dist.ProcessGroup:
    return dist.new_group(backend="hop", timeout=timedelta(seconds=timeout), pg_options=torchext.HopOptions(**options))


def out_neighbours(graph: str, size: int) -> list[set[int]]:
    """Whom each rank sends to in a built-in graph, itself included; written down again from the paper."""
    if graph == "double-ring":  # two ring-based graphs, joined rank by rank
        half = size // 2
        one = out_neighbours("ring-based", half)
        return [
            {rank, (rank + half) % size, *(place + rank // half * half for place in one[rank % half])}
            for rank in range(size)
        ]
    steps = {
        "ring": [1, -1],
        "ring-based": [1, -1, size // 2],
        "exponential": [2**p for p in range(8) if 2**p < size],
        "full": range(size),
    }[graph]
    return [{rank, *((rank + step) % size for step in steps)} for rank in range(size)]


def uniform(out: list[set[int]]) -> torch.Tensor:
    """weights[from, to] of a graph in which every rank has as many neighbours."""
    size = len(out)
    share = 1 / len(out[0])
    return torch.tensor(
        [[share if to in out[rank] else 0.0 for to in range(size)] for rank in range(size)], dtype=torch.float64
    )


class Trainer:
    """A small regression on one rank, with momentum, in float64; attached to "hop"."""

    def __init__(
        self,
        rank: Rank,
        *,
        model: nn.Module | None = None,
        lr: float = 0.1,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.rank = rank.rank
        self.group = group if group is not None else hop(**options)
        self.module = (model if model is not None else mlp()).double()
        self.ddp = DistributedDataParallel(self.module, process_group=self.group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=lr, momentum=0.9)
        self.sync: Any = torchext.attach(self.ddp, self.optimizer)
        self.step_count = 0

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.ddp, self.rank, self.step_count)
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        return float(loss.detach())

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs.double()), targets.double())


class Reference:
    """All workers of a standard Hop run in one process: x_{i,k+1} = sum_j W_ji x_{j,k} - step(g(x_{i,k})).

    A worker that has left after its model of iteration ``last[rank]`` is no longer averaged; its share goes to the
    others.
    """

    def __init__(
        self, weights: torch.Tensor, order: str, *, model: nn.Module | None = None, last: dict[int, int] | None = None
    ) -> None:
        first = (model if model is not None else mlp()).double()
        self.weights, self.order, self.last = weights, order, last or {}
        self.models = [copy.deepcopy(first) for _ in range(len(weights))]
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in self.models]
        self.iteration = 0
        self.fresh = True  # the first iteration of a session sends what the forward has left of the buffers

    def run(self, iterations: int) -> Reference:
        for _ in range(iterations):
            self._step()
        return self

    def flat(self, rank: int) -> torch.Tensor:
        return flat(self.models[rank])

    def mean(self) -> torch.Tensor:
        return torch.stack([flat(one) for one in self.models]).mean(0)

    def _step(self) -> None:
        sent = [_tensors(one) for one in self.models]
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, self.iteration).backward()
            if self.order == "serial":
                optimizer.step()
        after = [_tensors(one) for one in self.models]
        if self.order == "serial" or self.fresh:
            sent = after
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            weights = self._column(rank)
            for position, (name, tensor) in enumerate(_averaged(model)):
                total = sum(weight * sent[j][position] for j, weight in enumerate(weights))
                if name != "parameter":
                    total = total + after[rank][position] - sent[rank][position]
                tensor.data.copy_(total)
            if self.order == "parallel":
                optimizer.step()
        self.iteration += 1
        self.fresh = False

    def _column(self, rank: int) -> torch.Tensor:
        column = self.weights[:, rank].clone()
        for left, last in self.last.items():
            if self.iteration > last:
                column[left] = 0.0
        return column / column.sum()


def _averaged(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [("parameter", p) for p in model.parameters()] + [("buffer", b) for b in buffers]


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for _, tensor in _averaged(model)]
