"""Training with an attached model: every generator, both orders, any number of steps a rank.

Many checks share one world: each makes a group of its own inside it.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from attached import ORDERS, Trainer, batch, equal_everywhere, everywhere, flat, mlp
from harness import Rank, run_ranks
from rows import row
from torch import nn

pytestmark = pytest.mark.sanitize

GENERATORS = ("smart", "division", "random", "static", "ready-set")


def apart(local: torch.Tensor) -> float:
    """How far the models of all ranks are from their mean."""
    return float((local - local.mean(0)).norm())


def train_alone(rank: Rank) -> torch.Tensor:
    """The model of each rank when it has made 41 steps by itself."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(41):
        inputs, targets = batch(rank.rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
    return everywhere(flat(module))


def check_training(rank: Rank, generator: str, order: str, alone: torch.Tensor) -> None:
    trainer = Trainer(rank, generator=generator, order=order)
    before = trainer.evaluate()
    trainer.run(41)  # static: not after a round of all
    trainer.sync.wait()
    trained = flat(trainer.module)
    stats = trainer.sync.stats()
    assert stats["steps"] == 41, stats
    assert 0 < stats["averages"] <= 60, stats
    assert sum(stats["group_sizes"].values()) == stats["averages"]
    assert set(stats["group_sizes"]) <= {2, 3, 4}, stats
    assert stats["bytes_sent"] > 0 and stats["bucket_bytes"] >= 4 * flat(trainer.module).numel()
    assert min(v for k, v in stats.items() if k.endswith("_ms")) >= 0, stats

    with trainer.sync.averaged() as module:
        assert module is trainer.module
        average = flat(module)
        equal_everywhere(module)
        for call in (trainer.sync.synchronize, trainer.sync.averaged().__enter__, trainer.optimizer.step):
            with pytest.raises(RuntimeError, match=r"averaged\(\)"):
                call()
    local = everywhere(flat(trainer.module))
    torch.testing.assert_close(local.mean(0), average, rtol=0, atol=1e-6)
    # Groups draw the models together; the meeting above has formed the last one's average.
    assert apart(everywhere(trained)) < 0.75 * apart(alone)
    with torch.no_grad():  # equal, if the last group was one of all; their mean stays
        for parameter in trainer.module.parameters():
            parameter.add_(0.01 * (rank.rank - 1.5))
    own = flat(trainer.module)
    after = trainer.evaluate()
    assert after < 0.8 * before, (before, after)
    assert torch.equal(flat(trainer.module), own), "local values did not come back"

    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    torch.testing.assert_close(flat(trainer.module), average, rtol=0, atol=1e-6)
    assert 0 < trainer.sync.stats()["consensus_distance"] < 1
    trainer.run(2)
    trainer.sync.detach()


def body_trains(rank: Rank) -> bool:
    rank.init()
    alone = train_alone(rank)
    for generator, order in itertools.product(GENERATORS, ORDERS):
        with row(generator, order):
            check_training(rank, generator, order, alone)
    return True


def test_trains() -> None:
    assert run_ranks(body_trains, 4, deadline=120) == [True] * 4


def body_uneven(rank: Rank) -> bool:
    """Ranks that make different numbers of steps meet in every collective call of the synchronizer."""
    rank.init()
    for generator in ("smart", "random", "ready-set"):
        for order in ORDERS:
            trainer = Trainer(rank, generator=generator, order=order)
            trainer.run(3 + 5 * rank.rank)
            trainer.evaluate()
            trainer.run(2 * (4 - rank.rank))
            trainer.sync.synchronize()
            equal_everywhere(trainer.module)
            trainer.run(rank.rank)
            trainer.sync.detach()
    return True


def test_different_numbers_of_steps() -> None:
    assert run_ranks(body_uneven, 4) == [True] * 4


def body_at_the_deadline(rank: Rank) -> float:
    rank.init()
    trainer = Trainer(rank, generator="ready-set", order="atc", group_size=3)
    time.sleep(0.1 * rank.rank)  # from which it takes that the next three would be there within 0.2 s
    trainer.step()
    trainer.sync.wait()
    if rank.rank == 2:
        time.sleep(5)
    start = time.monotonic()
    trainer.step()
    if rank.rank < 2:
        trainer.sync.wait()
    seconds = time.monotonic() - start
    trainer.sync.detach()
    return seconds


def test_who_has_come_by_the_deadline_is_a_group() -> None:
    """On every rank, that of the generator too: nobody says a word to it meanwhile."""
    assert max(run_ranks(body_at_the_deadline, 3)) < 3
