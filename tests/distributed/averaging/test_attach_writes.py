"""What a script writes into the parameters of an averaged model between two steps."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, everywhere, flat
from harness import Rank, run_ranks
from rows import row

pytestmark = pytest.mark.sanitize

# In all of them an average is under way between two steps, and all workers average in every step.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {"order": "cta", "generator": "static"}),
    ("dssync", {"order": "cta"}),
    ("hop", {"order": "parallel"}),
    ("hop", {"order": "serial"}),
]


def fill(trainer: Trainer, value: float) -> None:
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            parameter.fill_(value)


def check_loads(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    trainer = Trainer(rank, backend=backend, lr=0.0, **options)
    names = trainer.module.state_dict()  # which waits; later nobody does
    trainer.run(2)
    for value in (7.0, 8.0):
        saved = {name: torch.full_like(tensor, value) for name, tensor in names.items()}
        trainer.module.load_state_dict(saved)
        trainer.loss().backward()  # and no step, as a gradient scaler has it
        for _ in range(3):
            assert (flat(trainer.module) == value).all(), flat(trainer.module)
            trainer.step()
            trainer.sync.wait()
        # Away from what must not come back: what workers hold differs, then is not a number any more.
        fill(trainer, float(rank.rank))
        trainer.step()
        fill(trainer, math.nan)
        trainer.step()
        trainer.sync.wait()
    trainer.module.load_state_dict(saved)
    trainer.run(3)
    trainer.sync.synchronize()
    assert (flat(trainer.module) == value).all(), flat(trainer.module)
    trainer.sync.detach()


def body_loads(rank: Rank) -> None:
    rank.init()
    for backend, options in VARIANTS:
        with row(backend, options):
            check_loads(rank, backend, options)


def test_what_is_loaded_stays() -> None:
    run_ranks(body_loads, 2)


def check_every_step(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    """Of a parameter that is written in every step the mean moves as written, and the workers come together."""
    trainer = Trainer(rank, backend=backend, lr=0.0, **options)
    fill(trainer, 100.0 * rank.rank)
    trainer.step()
    for _ in range(6):
        trainer.sync.wait()
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.add_(1)
        trainer.step()
    trainer.sync.wait()
    values = everywhere(flat(trainer.module))
    assert (values.mean(0) == 50.0 + 6).all(), values
    assert (values == values[0]).all(), values
    # One of them, the others not at all.
    first = next(trainer.module.parameters())
    for _ in range(3):
        trainer.sync.wait()
        with torch.no_grad():
            first.clamp_(-5, 5)
        trainer.step()
    trainer.sync.synchronize()
    assert (first == 5).all() and (flat(trainer.module)[first.numel() :] == 56).all()
    trainer.sync.detach()


def body_every_step(rank: Rank) -> None:
    rank.init()
    for backend, options in VARIANTS:
        with row(backend, options):
            check_every_step(rank, backend, options)


def test_what_is_written_in_every_step_is_added() -> None:
    run_ranks(body_every_step, 2)


def check_collective_inside(rank: Rank, order: str) -> None:
    """A hook of the script reduces a norm inside the step, and drains the averages owed to the other worker there."""
    trainer = Trainer(rank, lr=0.0, backend="prague", order=order)
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            parameter.fill_(100.0 * rank.rank)
    trainer.sync.wait()
    trainer.optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(torch.zeros(1)))
    for _ in range(20):
        time.sleep(0.01 * rank.rank)
        trainer.step()
        trainer.sync.wait()
    trainer.sync.synchronize()
    mean = float(flat(trainer.module).mean())
    trainer.sync.detach()
    assert mean == pytest.approx(50.0, abs=1e-3)


def body_collective_inside(rank: Rank) -> None:
    rank.init()
    for order in ORDERS:
        with row(order):
            check_collective_inside(rank, order)


def test_an_average_formed_inside_a_step_counts() -> None:
    """Both take part in it, so that the mean of all stays."""
    run_ranks(body_collective_inside, 2)
