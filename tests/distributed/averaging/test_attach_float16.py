"""Averages of float16 parameters whose sum is beyond float16's range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, everywhere, new_group
from harness import Rank, run_ranks
from rows import row
from torch import nn

pytestmark = pytest.mark.sanitize

START = 40_000.0  # float16 ends at 65504


class Large(nn.Module):
    """Large weights that training leaves as they are."""

    def __init__(self, numel: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), START, dtype=torch.float16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.sum(1, keepdim=True) + (self.weight * 0).sum()


# In frames, through shared memory and in a ring: subset_allreduce.h.
MEANS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("prague", 2, 64, {"generator": "static"}),
    ("dssync", 3, 64, {"group_size": 3}),
    ("dssync", 4, 100_000, {"group_size": 4}),
    ("dssync", 4, 100_000, {"group_size": 4, "shared_memory": False}),
]


def check_mean(rank: Rank, backend: str, size: int, numel: int, options: dict[str, Any], order: str) -> None:
    group = new_group(backend, list(range(size)), order=order, **options)
    if rank.rank >= size:
        return
    model = Large(numel)
    trainer = Trainer(rank, model=model, group=group)
    with torch.no_grad():
        model.weight.fill_(32_000 + 8_000 * rank.rank)
    trainer.run(2)
    trainer.sync.wait()
    everyone = everywhere(model.weight.detach().float(), group)
    assert (everyone == everyone[0]).all()
    # Two roundings of the format.
    mean = pytest.approx(32_000 + 4_000 * (size - 1), rel=2e-3)
    assert float(everyone[0].min()) == mean and float(everyone[0].max()) == mean
    stats = trainer.sync.stats()
    sizes = model.weight.nbytes * stats["averages"]
    shared = numel > 64 and options.get("shared_memory", True)
    assert sizes > 0 and stats["bytes_shared"] == (sizes if shared else 0), stats
    trainer.sync.detach()


def body_means(rank: Rank) -> None:
    rank.init()
    for values in MEANS:
        for order in ORDERS:
            with row(*values, order):
                check_mean(rank, *values, order)


def test_means() -> None:
    run_ranks(body_means, 4)


def check_same(rank: Rank, order: str) -> None:
    """With collectives that drain outstanding averages, and weights that are written in step after step."""
    model = Large()
    trainer = Trainer(rank, model=model, order=order)
    for step in range(16):
        trainer.step()
        if step > 8:
            trainer.sync.wait()
            with torch.no_grad():
                model.weight.clamp_(max=60_000.0)
        if step % 4 == 3:
            dist.all_reduce(torch.ones(1))
    assert trainer.sync.stats()["averages"] > 0
    trainer.sync.synchronize()
    assert (float(model.weight.min()), float(model.weight.max())) == (START, START)
    trainer.sync.detach()


def body_same(rank: Rank) -> None:
    rank.init()
    for order in ORDERS:
        with row(order):
            check_same(rank, order)


def test_what_is_the_same_on_two_workers_stays_so() -> None:
    run_ranks(body_same, 2)
