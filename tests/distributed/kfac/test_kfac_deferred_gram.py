"""Products of several steps made together: factors are those of a twin that makes each step's at once.

The twin makes inverses in every step that updates its factors, and so has all products then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC

# The numbers of rows of a step's calls, one list a micro-batch. A step of more than 256 rows is not kept, 512 are kept
# at most, and the first step has made places for eight of its own size.
Step = list[list[int]]
SERIES: dict[str, list[Step]] = {
    "small": [[[3]], [[3]], [[5]], [[1]], [[3]], [[40]], [[3]]],
    "many": [[[100]]] * 12,
    "large between small": [[[20]], [[20]], [[300]], [[20]], [[256]], [[257]], [[20]]],
    "calls": [[[4, 6]], [[200, 100]], [[200, 56]], [[300, 5]], [[5, 300]], [[4, 6]]],
    "micro-batches": [[[4], [6]], [[120], [130], [140]], [[8], [8]], [[8], [8]]],
    "none in some": [[[8]], [[0]], [[8]], [[]], [[8]]],
}


class Twice(nn.Module):
    """Two layers, with and without a bias, called as often as there are batches."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(9, 34)
        self.second = nn.Linear(34, 5, bias=False)
        self.to(dtype)

    def forward(self, batches: Sequence[Tensor]) -> Tensor:
        outputs = [self.second(torch.tanh(self.first(batch))) for batch in batches]
        return torch.cat(outputs) if outputs else torch.zeros(1, requires_grad=True)


def twins(dtype: torch.dtype, **options: Any) -> list[tuple[DistributedDataParallel, KFAC]]:
    pairs = []
    for interval in (40, options.get("factor_update_steps", 1)):
        model = DistributedDataParallel(Twice(dtype), find_unused_parameters=True)
        optimizer = KFAC(model, lr=0.0, inverse_update_steps=interval, kl_clip=None, strategy="spd", **options)
        pairs.append((model, optimizer))
    return pairs


def batches(rank: Rank, number: int, rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank.rank)
    # Unequal ranks: each has its own average.
    return [torch.randn(r + (rank.rank if r > 0 else 0), 9, generator=generator).to(dtype) for r in rows]


def factors(optimizer: KFAC) -> list[Tensor]:
    return [factor[0] for factor in optimizer.state_dict()["kfac"]["factors"]]


def difference(pairs: list[tuple[DistributedDataParallel, KFAC]]) -> float:
    kept, at_once = (factors(optimizer) for _, optimizer in pairs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(kept, at_once, strict=True))


def body_series(rank: Rank, steps: list[Step], dtype: torch.dtype, look: bool, options: dict[str, Any]) -> list[float]:
    rank.init("gloo")
    pairs = twins(dtype, **options)
    found = []
    for number, micro in enumerate([[[7]], *steps, *steps]):  # step 0 makes inverses
        for model, optimizer in pairs:
            optimizer.zero_grad()
            for part, rows in enumerate(micro):
                inputs = batches(rank, 10 * number + part, rows, dtype)
                (model(inputs).square().sum() / (100 * len(micro))).backward()
            optimizer.step()
        if look:
            found.append(difference(pairs))
    return [*found, difference(pairs)]


@pytest.mark.parametrize("look", [False, True], ids=["at the end", "after each step"])
@pytest.mark.parametrize("name", SERIES)
def test_factors_are_those_of_each_step(name: str, look: bool) -> None:
    for found in run_ranks(body_series, 2, SERIES[name], torch.float64, look, {}):
        assert max(found) < 1e-13, found


@pytest.mark.parametrize(
    "options",
    [{"martens_decay": True}, {"factor_decay": 0.0}, {"factor_update_steps": 2}, {"factor_scaling": "kfac-pytorch"}],
    ids=str,
)
def test_factors_under_other_options(options: dict[str, Any]) -> None:
    for found in run_ranks(body_series, 2, SERIES["many"], torch.float64, False, options):
        assert max(found) < 1e-13, found


def test_factors_in_float32() -> None:
    for found in run_ranks(body_series, 2, SERIES["many"], torch.float32, False, {}):
        assert max(found) < 2e-6, found


def a_step(pair: tuple[DistributedDataParallel, KFAC], inputs: list[Tensor]) -> None:
    model, optimizer = pair
    (model(inputs).square().sum() / 100).backward()
    optimizer.step()
    optimizer.zero_grad()


def body_odd(rank: Rank, odd: str) -> tuple[float, list[int]]:
    """Among plain steps one that is odd on the last rank, or on all."""
    rank.init("gloo")
    pairs = twins(torch.float64)
    for number in range(8):
        for pair in pairs:
            inputs = batches(rank, number, [6], torch.float64)
            if number in (3, 6) and odd == "overflows" and rank.rank == 1:
                inputs[0][2, 4] = 1e200  # finite, and so is the gradient; its square is not
                pair[0].module.first.weight.data[:, 4] = 0
            if number in (3, 6) and odd == "left out":
                (pair[0](batches(rank, 50, [6], torch.float64)).square().sum() / 100).backward()
                pair[1].zero_grad()
            if number == 5 and odd == "reloaded":
                pair[1].load_state_dict(pair[1].state_dict())
            a_step(pair, inputs)
    return difference(pairs), [optimizer.stats()["factors_left_out"] for _, optimizer in pairs]


@pytest.mark.parametrize("odd", ["overflows", "left out", "reloaded"])
def test_steps_that_do_not_count(odd: str) -> None:
    for rank, (found, left_out) in enumerate(run_ranks(body_odd, 2, odd)):
        assert found < 1e-13
        assert left_out == ([2, 2] if odd == "overflows" and rank == 1 else [0, 0])
