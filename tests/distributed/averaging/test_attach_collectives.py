"""A collective of the script after every step, a logged loss: workers find each other after it.

Before they block in it they take themselves out of the groups. No assertion is about time: a rank that a busy machine
holds up for longer than the others wait is left out of one average, hence "most".
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, equal_everywhere
from harness import Rank, run_ranks

pytestmark = pytest.mark.sanitize

GENERATORS = ("smart", "division", "random", "ready-set")
STEPS = 30
MOST = 0.7


def full_groups(trainer: Trainer, group_size: int) -> int:
    sizes: dict[int, int] = trainer.sync.stats()["group_sizes"]
    return sum(count for size, count in sizes.items() if size >= group_size)


def body_logs_its_loss(rank: Rank, order: str, group_size: int) -> list[int]:
    rank.init()
    counts = []
    for generator in GENERATORS:
        trainer = Trainer(rank, generator=generator, order=order, group_size=group_size)
        trainer.run(3)  # DDP's own collectives
        trainer.sync.synchronize()
        before = full_groups(trainer, group_size)
        for _ in range(STEPS):
            loss = torch.tensor(trainer.step())
            dist.all_reduce(loss)
            assert loss.isfinite()
        trainer.sync.wait()
        counts.append(full_groups(trainer, group_size) - before)
        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        trainer.sync.detach()
    return counts


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_a_collective_after_every_step_leaves_groups_full(order: str, group_size: int) -> None:
    for counts in run_ranks(body_logs_its_loss, 4, order, group_size):
        assert min(counts) >= MOST * STEPS, dict(zip(GENERATORS, counts, strict=True))


def body_two_models(rank: Rank, order: str) -> list[int]:
    rank.init()
    models = [Trainer(rank, order=order, group_size=4) for _ in range(2)]
    for model in models:
        model.run(3)
    for model in models:
        model.sync.synchronize()
    before = [full_groups(model, 4) for model in models]
    for _ in range(STEPS):
        loss = torch.tensor(sum(model.step() for model in models))
        dist.all_reduce(loss)
    counts = [full_groups(model, 4) - done for model, done in zip(models, before, strict=True)]
    for model in models:
        model.sync.synchronize()
        equal_everywhere(model.module)
    for model in models:
        model.sync.detach()
    return counts


@pytest.mark.parametrize("order", ORDERS)
def test_so_it_does_for_two_models_of_one_loop(order: str) -> None:
    for counts in run_ranks(body_two_models, 4, order):
        assert min(counts) >= MOST * STEPS, counts


def body_one_stops(rank: Rank, order: str) -> list[Any]:
    """Rank 3 takes no step from the tenth on until the twentieth, and comes to every collective."""
    rank.init(timeout=20)
    trainer = Trainer(rank, order=order, group_size=4)
    totals = []
    for step in range(STEPS):
        if rank.rank != 3 or not 10 <= step < 20:
            trainer.step()
        total = torch.ones(1)
        dist.all_reduce(total)
        totals.append(float(total))
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()
    return totals


@pytest.mark.parametrize("order", ORDERS)
def test_nobody_waits_for_ever_for_a_worker_that_takes_no_step(order: str) -> None:
    assert run_ranks(body_one_stops, 4, order) == [[4.0] * STEPS] * 4
