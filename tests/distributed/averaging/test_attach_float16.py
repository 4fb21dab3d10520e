"""Averages of float16 parameters whose sum is beyond float16's range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, everywhere
from harness import Rank, run_ranks
from torch import nn

pytestmark = pytest.mark.sanitize

START = 40_000.0  # float16 ends at 65504


class Large(nn.Module):
    """Large weights that training leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), START, dtype=torch.float16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.sum(1, keepdim=True) + (self.weight * 0).sum()


def body_means(rank: Rank, backend: str, options: dict[str, Any], order: str) -> tuple[float, bool]:
    rank.init()
    model = Large()
    trainer = Trainer(rank, model=model, backend=backend, order=order, **options)
    with torch.no_grad():
        model.weight.fill_(32_000 + 8_000 * rank.rank)
    trainer.run(2)
    trainer.sync.wait()
    everyone = everywhere(model.weight.detach().float())
    return float(everyone[rank.rank].mean()), bool((everyone == everyone[0]).all())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("backend", "size", "options"),
    [
        ("prague", 2, {"generator": "static"}),
        ("dssync", 3, {"group_size": 3}),
        ("dssync", 4, {"group_size": 4}),
        ("dssync", 4, {"group_size": 4, "shared_memory": False}),
    ],
    ids=str,
)
def test_means(backend: str, size: int, options: dict[str, Any], order: str) -> None:
    expected = 32_000 + 4_000 * (size - 1)
    for mean, equal in run_ranks(body_means, size, backend, options, order):
        assert equal
        assert mean == pytest.approx(expected, rel=2e-3)  # two roundings of the format


def body_same(rank: Rank, order: str) -> tuple[float, float, int]:
    """With collectives that drain outstanding averages, and weights that are written in step after step."""
    rank.init()
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
    averages = trainer.sync.stats()["averages"]
    trainer.sync.synchronize()
    return float(model.weight.min()), float(model.weight.max()), averages


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_the_same_on_two_workers_stays_so(order: str) -> None:
    for least, most, averages in run_ranks(body_same, 2, order):
        assert (least, most) == (START, START)
        assert averages > 0
