"""What people do around the training loop, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from largest import largest
from sharded import EXACT, SIZES, Pair, Transformer, adamw, check_within, difference, each_in_ways, made, mlp, sgd
from torch import nn

pytestmark = pytest.mark.sanitize


class Late(torch.autograd.Function):
    """Its backward pass takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """Layers whose gradients come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Late.apply(torch.tanh(layer(x)), self.seconds)
        return x


def body_slow(rank: Rank) -> float:
    """One rank waits, in its next forward pass, for exchanges that the other posts at its leisure."""
    rank.init("dear")
    timeout = 2.5
    pair = Pair(rank, made(Slow), sgd, timeout=timeout).run(4)
    pair.zero_grad()
    pair.module.seconds = 0.6 * timeout if rank.rank == 1 else 0.0
    pair.losses()[0].backward()
    pair.module.seconds = 0.0
    pair.step()
    return pair.done()


def test_a_long_queue_of_exchanges_is_no_failure() -> None:
    assert largest(run_ranks(body_slow, 2)) < EXACT


def body_closure(rank: Rank) -> float:
    pair = Pair(rank, made(mlp), sgd)
    for _ in range(5):

        def closure(ours: bool) -> torch.Tensor:
            (pair.optimizer if ours else pair.plain).zero_grad()
            loss = pair.losses()[0 if ours else 1]
            loss.backward()
            return loss

        pair.optimizer.step(lambda: closure(True))
        pair.plain.step(lambda: closure(False))
        pair.steps += 1
    return pair.done()


def body_detach(rank: Rank) -> float:
    pair = Pair(rank, made(mlp), adamw).run(5)
    pair.sync.detach()
    pair.sync.detach()
    assert all(type(p) is nn.Parameter for group in pair.optimizer.param_groups for p in group["params"])
    return difference(pair.run(5).module, pair.twin)


def body_collectives(rank: Rank) -> float:
    """Collectives of the user in the middle of everything, and two models in turn."""
    pairs = [Pair(rank, made(mlp), sgd), Pair(rank, made(Transformer), adamw)]
    for step in range(8):
        for pair in pairs:
            pair.step()
            total = torch.full((50_000,), float(rank.rank + step))
            dist.all_reduce(total, group=pair.group)
            assert total[-1] == sum(range(rank.size)) + rank.size * step
    return largest(pair.done() for pair in pairs)


BODIES = [body_closure, body_detach, body_collectives]


@pytest.mark.parametrize("size", SIZES)
def test_around_the_training_loop(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES):
        check_within(worst)
