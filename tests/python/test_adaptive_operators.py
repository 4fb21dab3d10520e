"""Operators of adaptive embeddings: derivatives, opcheck, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchext.nn import AdaptiveEmbeddingBag
from torchext.nn._ops import _ops


def test_the_derivative_is_right() -> None:
    torch.manual_seed(2)
    index = torch.full((6 * 3,), -1, dtype=torch.int32)
    index[torch.tensor([0, 1, 4, 8, 9, 10, 11, 17])] = torch.randperm(8).to(torch.int32)
    pool = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    ids, offsets = torch.randint(0, 6, (9,)), torch.tensor([0, 3, 3, 8])
    weights = torch.randn(9, dtype=torch.float64, requires_grad=True)
    for mode in (0, 1, 2):
        given = weights if mode == 0 else None

        def bag(values: Tensor, scales: Tensor | None, mode: int = mode) -> Tensor:
            output: Tensor = _ops.adaptive_bag(values, index, ids, offsets, 0, False, scales, 6, 3, mode, 2)[0]
            return output

        assert torch.autograd.gradcheck(bag, (pool, given))


def samples() -> list[tuple[str, tuple[Any, ...]]]:
    torch.manual_seed(3)
    index = torch.full((12,), -1, dtype=torch.int32)
    index[:5] = torch.arange(5, dtype=torch.int32)
    pool, ids, offsets = torch.randn(5, 4), torch.randint(0, 4, (6,)), torch.tensor([0, 2])
    layout = (ids, offsets, 0, False, None, 4, 3, 0, -1)
    upstream, none = torch.randn(2, 12), torch.empty(0, 12, dtype=torch.int32)
    sketch, clock = torch.empty(0, dtype=torch.int32), torch.tensor([0.0, 1.0], dtype=torch.float64)
    observed = (torch.zeros(12), sketch, clock)
    return [
        ("adaptive_bag", (pool.clone().requires_grad_(), index, *layout)),
        ("adaptive_bag", (pool, index, ids, None, 3, False, torch.randn(6).requires_grad_(), 4, 3, 0, 1)),
        ("adaptive_bag", (pool.clone().requires_grad_(), index, *layout[:-2], 2, -1)),
        ("adaptive_bag_weight_gradient", (upstream, pool, index, *layout)),
        ("adaptive_bag_dense_gradient", (upstream, none, pool, index, *layout, True)),
        ("adaptive_bag_observe_", (upstream, none, pool, index, *observed, *layout, False, 0.99)),
        ("adaptive_bag_sparse_gradient", (upstream, none, pool, index, *observed, *layout, False, 0.99)),
        (
            "adaptive_bag_update_",
            (
                *(upstream, none, pool, [torch.zeros(5)], index, *observed, torch.tensor(0.1, dtype=torch.float64)),
                *(*layout, False, 0.99, "adagrad", 0.9, 0.999, 1e-8),
            ),
        ),
        ("adaptive_bag_renorm_", (pool, index, ids, 4, 3, 0.5, 2.0)),
        ("adaptive_table_prune_", (index, torch.rand(12), sketch, 5, 4, 3, 5, 2, 0.0)),
        ("adaptive_table_carry_", (pool, torch.tensor([[1, 2], [4, 1]]), torch.tensor([[7, 4]]))),
        ("adaptive_table_meet_", (torch.zeros(1, dtype=torch.uint8), torch.tensor([[1, 0], [2, 1], [7, 3]]), 3)),
        ("adaptive_table_candidates", (index, torch.rand(12), sketch, 5, 4, 3)),
    ]


@pytest.mark.parametrize("number", range(13))
def test_opcheck(number: int) -> None:
    name, arguments = samples()[number]
    torch.library.opcheck(getattr(_ops, name).default, arguments)


@pytest.mark.parametrize("training", ["dense", "fused"])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_compiles_into_one_graph(training: str, budget: float) -> None:
    def build() -> AdaptiveEmbeddingBag:
        torch.manual_seed(4)
        update = {"lr": 0.5} if training == "fused" else {}
        bag = AdaptiveEmbeddingBag(30, 16, mode="sum", training=training, budget=budget, chunk_dim=4, **update)
        bag._take(torch.randn(30, 16))
        return bag

    eager, compiled = build(), build()
    run = torch.compile(compiled, fullgraph=True)
    for step in range(3):
        ids, offsets = torch.randint(0, 30, (20 + step,)), torch.tensor([0, 4, 4, 11])
        outputs = [module(ids, offsets) for module in (eager, run)]
        torch.testing.assert_close(outputs[0], outputs[1])
        for module, output in zip((eager, compiled), outputs, strict=True):
            output.square().sum().backward()
            if training == "dense":
                torch.optim.SGD([module.pool], lr=0.1).step()
                module.zero_grad()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, msg=name)
