"""The right answer of data-parallel training: one process that trains on every rank's batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from lab.workloads.contenders import MakeOptimizer, Training

Loss = Callable[[nn.Module, int, int], torch.Tensor]  # of (model, rank, step)


def train_alone(
    module: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, *, world_size: int, steps: int
) -> list[torch.Tensor]:
    """Returns the parameters after ``steps`` steps with the mean gradient of all ranks; ``module`` stays as it is."""
    alone = copy.deepcopy(module)
    optimizer = make_optimizer(alone.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            torch.autograd.backward(loss(alone, rank, step) / world_size)
        optimizer.step()
    return [weight.detach() for weight in alone.parameters()]


def distance(training: Training, start: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Returns how far the parameters are from ``expected``, relative to the way from ``start``; the worst rank's.

    In the 2-norm: Adam's first steps have full length for gradients of any size, and so for one that is nothing but
    rounding, in which no two orders of adding agree.
    """
    training.settle()
    training.synchronize()
    found = training.parameters()

    def length(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
        squares = (float((a.double() - b.double()).square().sum()) for a, b in zip(ones, others, strict=True))
        return math.sqrt(sum(squares))

    worst = torch.tensor([length(found, expected) / length(start, expected)], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()
