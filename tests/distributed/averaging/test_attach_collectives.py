"""A collective of the script after every step, a logged loss: workers find each other after it.

Before they block in it they take themselves out of the groups. No assertion is about time: a rank that a busy machine
holds up for longer than the others wait is left out of one average, hence "most".
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, equal_everywhere
from harness import Rank, run_ranks
from rows import row

pytestmark = pytest.mark.sanitize

GENERATORS = ("smart", "division", "random", "ready-set")
STEPS = 20
MOST = 0.7


def full_groups(trainer: Trainer, group_size: int) -> int:
    sizes: dict[int, int] = trainer.sync.stats()["group_sizes"]
    return sum(count for size, count in sizes.items() if size >= group_size)


def check_logging_its_loss(rank: Rank, generator: str, order: str, group_size: int) -> None:
    trainer = Trainer(rank, generator=generator, order=order, group_size=group_size)
    trainer.run(3)  # DDP's own collectives
    trainer.sync.synchronize()
    before = full_groups(trainer, group_size)
    for _ in range(STEPS):
        loss = torch.tensor(trainer.step())
        dist.all_reduce(loss)
        assert loss.isfinite()
    trainer.sync.wait()
    count = full_groups(trainer, group_size) - before
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()
    assert count >= MOST * STEPS, count


def check_two_models(rank: Rank, order: str) -> None:
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
    assert min(counts) >= MOST * STEPS, counts


def body_logs_its_loss(rank: Rank) -> None:
    rank.init()
    for values in itertools.product(GENERATORS, ORDERS, (2, 4)):
        with row(*values):
            check_logging_its_loss(rank, *values)
    for order in ORDERS:
        with row("two models of one loop", order):
            check_two_models(rank, order)


def test_a_collective_after_every_step_leaves_groups_full() -> None:
    run_ranks(body_logs_its_loss, 4, deadline=120)


def check_one_stops(rank: Rank, order: str) -> None:
    """Rank 3 takes no step from the tenth on until the twentieth, and comes to every collective."""
    trainer = Trainer(rank, order=order, group_size=4)
    for step in range(STEPS):
        if rank.rank != 3 or not 10 <= step < 20:
            trainer.step()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert float(total) == 4.0
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()


def body_one_stops(rank: Rank) -> None:
    rank.init(timeout=20)
    for order in ORDERS:
        with row(order):
            check_one_stops(rank, order)


def test_nobody_waits_for_ever_for_a_worker_that_takes_no_step() -> None:
    run_ranks(body_one_stops, 4)
