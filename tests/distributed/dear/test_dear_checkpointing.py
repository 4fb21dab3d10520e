"""Activation checkpoints with "dear": a reentrant one is a backward pass of its own inside the outer one."""

from __future__ import annotations

import pytest
import torch
from harness import Rank, run_ranks
from sharded import ROWS, SIZES, Pair, check_within, each_in_ways, made, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.sanitize


class Checkpointed(nn.Module):
    """All of it under checkpoints: where they are reentrant, the first gradient comes from inside one."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 9))
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            x = x.clone().requires_grad_()  # without one that wants gradients a reentrant checkpoint has none
        hidden = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return checkpoint(self.head, hidden, use_reentrant=self.reentrant)


class InOneDict(Checkpointed):
    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {"logits": [super().forward(x)]}


def body_training(rank: Rank) -> dict[str, float]:
    found = {}
    for Checkpointed.reentrant in (True, False):
        for static_graph in (False, True):
            pair = Pair(rank, made(Checkpointed), sgd, static_graph=static_graph)
            found[f"reentrant={Checkpointed.reentrant} {static_graph=}"] = pair.run(10).done()
    return found


def body_penalty(rank: Rank) -> float:
    """torch.autograd.grad walks the output's hooks, and is no backward pass of the parameters."""
    pair = Pair(rank, made(lambda: nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 4))), sgd)
    for step in range(6):
        pair.zero_grad()
        for model, share in ((pair.ddp, slice(rank.rank, None, rank.size)), (pair.twin, slice(None))):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.rand(ROWS * rank.size, 16, generator=generator)[share].requires_grad_()
            outputs = model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            (outputs.square().mean() + slope.square().mean()).backward()
        pair.update()
    return pair.done()


def body_nested_output(rank: Rank) -> float:
    Checkpointed.reentrant = True
    pair = Pair(rank, made(InOneDict), sgd)
    for step in range(6):
        pair.zero_grad()
        for model, share in ((pair.ddp, slice(rank.rank, None, rank.size)), (pair.twin, slice(None))):
            inputs = torch.rand(ROWS * rank.size, 16, generator=torch.Generator().manual_seed(step))[share]
            model(inputs)["logits"][0].square().mean().backward()
        pair.update()
    return pair.done()


BODIES = [body_training, body_penalty, body_nested_output]


@pytest.mark.parametrize("size", SIZES)
def test_checkpoints(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES):
        check_within(worst)
