"""Several models of one loop, each with groups of its own: no order of steps makes workers wait for ever."""

from __future__ import annotations

import random
import time

import pytest
import torch.distributed as dist
from attached import Trainer, equal_everywhere
from harness import Rank, run_ranks

MODELS = 3
STEPS = 25
PAUSES = (0.0, 0.15)  # longer than a model waits for its average before the others keep their promises


def body(rank: Rank, generator: str, order: str) -> int:
    rank.init(timeout=20)
    models = [Trainer(rank, generator=generator, order=order, seed=seed) for seed in range(MODELS)]
    chance = random.Random(rank.rank)
    for step in range(STEPS):
        # DDP's own collective calls in the first two steps stand in one order.
        turns = range(MODELS) if step < 3 else chance.sample(range(MODELS), MODELS)
        for turn in turns:
            time.sleep(0.0 if step < 3 else chance.choice(PAUSES))
            models[turn].step()
    averages = 0
    for model in models:
        model.sync.synchronize()
        averages += model.sync.stats()["averages"]
    for model in models:
        equal_everywhere(model.module)
        model.sync.detach()
    dist.barrier()
    return averages


@pytest.mark.parametrize(("generator", "order"), [("random", "atc"), ("smart", "cta")])
def test_in_other_orders_on_other_ranks(generator: str, order: str) -> None:
    assert min(run_ranks(body, 4, generator, order)) > 0
