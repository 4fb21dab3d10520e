"""A model whose layers send rows beside one that is trained by plain DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import Rank
from largest import largest
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from torchext import auto

EXACT = 1e-6


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)  # else tiny gradients count by their sign


class Pair:
    """One model by rows and one by plain DDP, on the same batches.

    Args:
        rank: This one.
        make: The class of the model. It has ``names`` of layers, and ``batch(rows, generator)`` for inputs and targets.
        optimizer: From parameters.
        rows: Places of a layer.
        ddp: Arguments of both DDP models.
    """

    def __init__(self, rank: Rank, make: Any, optimizer: Any, *, rows: int = 16, **ddp: Any) -> None:
        self.rank, self.make, self.steps = rank, make, 0
        model, plain = make(), make()
        if rank.rank:
            for parameter in model.parameters():
                parameter.data.add_(1)  # all get rank 0's
        self.layers = auto.FactorLayers(model, make.names, rows)
        self.layers.install()
        self.models = [DistributedDataParallel(one, **ddp) for one in (model, plain)]
        self.layers.follow(self.models[0])
        self.optimizers = [optimizer(one.parameters()) for one in self.models]

    def backward(self, rows: int, *, part: int = 0, **arguments: Any) -> None:
        generator = torch.Generator().manual_seed(100 * self.steps + 10 * part + self.rank.rank)
        inputs, targets = self.make.batch(rows, generator)
        for model in self.models:
            (mse_loss(model(inputs, **arguments), targets, reduction="sum") / 8).backward()

    def step(self, *, clip: bool = False) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1

    def apart(self) -> float:
        ours, plain = ([p.detach() for p in model.parameters()] for model in self.models)
        for parameter in ours:
            others = [torch.empty_like(parameter) for _ in range(self.rank.size)]
            dist.all_gather(others, parameter)
            assert all(torch.equal(other, parameter) for other in others)
        return largest(
            float((a - b).abs().max() / b.abs().max().clamp(min=0.1)) for a, b in zip(ours, plain, strict=True)
        )
