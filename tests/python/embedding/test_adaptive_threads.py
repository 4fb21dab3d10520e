"""What adaptive embeddings compute is the same to the bit at any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchext.nn import AdaptiveEmbeddingBag

ROWS, DIM, IDS, BAGS = 3000, 16, 20_000, 2000
LAYOUTS = ("direct", "hash", "sketch")
CASES: list[dict[str, Any]] = [
    *({"training": "fused", "mode": "sum", "layout": layout} for layout in LAYOUTS),
    *({"training": training, "mode": "mean", "layout": "hash"} for training in ("dense", "sparse")),
    *({"training": "fused", "optimizer": name, "mode": "mean", "budget": 1.0} for name in ("sgd", "adam")),
    {"training": "dense", "mode": "sum", "budget": 1.0, "weighted": True},
    {"training": "sparse", "mode": "max", "budget": 1.0, "padding_idx": 1},
    {"training": "fused", "optimizer": "sgd", "mode": "sum", "layout": "sketch", "weighted": True},
    {"training": "fused", "optimizer": "adam", "mode": "max", "layout": "direct", "dtype": torch.bfloat16},
    {"training": "sparse", "mode": "sum", "layout": "sketch", "dtype": torch.bfloat16, "weighted": True},
    {"training": "dense", "mode": "mean", "layout": "direct", "dtype": torch.float64, "max_norm": 1.0},
    {"training": "fused", "mode": "sum", "budget": 1.0, "dtype": torch.float16, "scale_grad_by_freq": True},
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As many as before, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train(threads: int, weighted: bool = False, **options: Any) -> dict[str, Tensor]:
    """All that a few steps make."""
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    given = {"budget": 0.3, "chunk_dim": 4, "init_std": 0.1, **options}
    bag = AdaptiveEmbeddingBag(ROWS, DIM, **given)
    fused = options["training"] == "fused"
    optimizer = None if fused else torch.optim.SGD(bag.parameters(), lr=0.1)
    made: dict[str, Tensor] = {}
    for step in range(4):
        ids = (torch.rand(IDS) ** 3 * ROWS).long()
        weights = torch.rand(IDS).to(bag.pool.dtype).requires_grad_() if weighted else None
        output = bag(ids, torch.arange(0, IDS, IDS // BAGS), weights)
        (output.square() + output.sin()).sum().backward()
        made[f"output{step}"] = output.detach()
        if weights is not None and weights.grad is not None:
            made[f"weights{step}"] = weights.grad
        if optimizer is not None and bag.pool.grad is not None:
            made[f"gradient{step}"] = bag.pool.grad.to_dense()
            optimizer.step()
            optimizer.zero_grad()
        bag.prune(optimizer=optimizer, hysteresis=0.1)
    return made | bag.state_dict() | {"pool": bag.pool.detach()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_results_do_not_depend_on_threads(case: dict[str, Any]) -> None:
    single = train(1, **case)
    assert single["pool"].any()
    assert ("gradient3" in single) == (case["training"] != "fused")
    assert ("weights3" in single) == ("weighted" in case)
    for threads in (2, 3, 5):
        for name, value in train(threads, **case).items():
            assert torch.equal(value, single[name]), (threads, name)
