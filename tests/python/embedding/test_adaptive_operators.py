"""Operators of adaptive embeddings: derivatives, opcheck, torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from torchext.nn import AdaptiveEmbeddingBag
from torchext.nn.operators import _ops


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


def of_table(layout: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator, from a table of this layout."""
    optimizer, options = "adam", {} if layout == "identity" else {"layout": layout}
    budget = 1.0 if layout == "identity" else 0.3
    torch.manual_seed(4)
    bag = AdaptiveEmbeddingBag(50, 8, budget=budget, chunk_dim=4, training="fused", optimizer=optimizer, **options)
    for _ in range(3):
        bag(torch.randint(0, 50, (10, 4))).sub(1).square().sum().backward()
        bag.prune()
    pool, index, observed = bag.pool.detach(), bag.index, (bag.index, bag.utility, bag.sketch, bag.clock)
    ids, offsets, weights = torch.randint(0, 50, (9,)), torch.tensor([0, 0, 4, 9], dtype=torch.int32), torch.rand(9)
    weighted = (ids, offsets, 0, True, weights, 50, 2, 0, 3)
    largest = (ids, offsets, 0, True, None, 50, 2, 2, 3)
    argmax = _ops.adaptive_bag(pool, index, *largest)[1]
    upstream, none = torch.randn(3, 8), torch.empty(0, 8, dtype=torch.int32)
    updates = {
        f"adaptive_bag_update_ {name}": (
            *(upstream, none, pool, state, *observed, bag.lr, *weighted),
            *(True, 0.99, name, 0.9, 0.999, 1e-8),
        )
        for name, state in (("sgd", []), ("adagrad", [torch.rand(len(pool))]), ("adam", bag.state))
    }
    size = (bag.budget_chunks, 50, 2)
    of_pruning = {
        "adaptive_table_prune_": (index, bag.utility, bag.sketch, *size, bag.budget_chunks, 5, 0.1),
        "adaptive_table_candidates": (index, bag.utility, bag.sketch, *size),
    }
    return {
        "adaptive_bag": (pool.clone().requires_grad_(), index, *weighted),
        "adaptive_bag largest": (pool.clone().requires_grad_(), index, *largest),
        "adaptive_bag_weight_gradient": (upstream, pool, index, *weighted),
        "adaptive_bag_dense_gradient": (upstream, argmax, pool, index, *largest, False),
        "adaptive_bag_observe_": (upstream, argmax, pool, *observed, *largest, False, 0.99),
        "adaptive_bag_sparse_gradient": (upstream, argmax, pool, *observed, *largest, False, 0.99),
        **updates,
        "adaptive_bag_renorm_": (pool, index, ids, 50, 2, 0.5, 1.0),
        **({} if layout == "identity" else of_pruning),
    }


@pytest.mark.parametrize("layout", ["identity", "direct", "hash", "sketch"])
def test_opcheck_of_every_layout(layout: str) -> None:
    for name in of_table(layout):
        arguments = of_table(layout)[name]  # what the others have not written to
        torch.library.opcheck(getattr(_ops, name.split()[0]).default, arguments)


def test_opcheck_of_what_no_graph_has() -> None:
    """It answers what the machine says, and has no fake kernel."""
    operator = _ops.adaptive_table_advise_huge_pages.default
    torch.library.opcheck(operator, (torch.ones(5, 4),), test_utils=("test_schema", "test_autograd_registration"))


COMPILED: list[dict[str, Any]] = [
    *({"budget": 0.5, "layout": layout, "mode": "sum", "weighted": True} for layout in ("direct", "hash", "sketch")),
    {"budget": 0.5, "layout": "hash", "mode": "mean", "padding_idx": 3, "optimizer": "adam"},
    {"budget": 0.5, "layout": "sketch", "mode": "max", "padding_idx": 3, "optimizer": "sgd"},
    {"budget": 0.5, "layout": "direct", "mode": "sum", "max_norm": 0.5, "scale_grad_by_freq": True},
    {"budget": 1.0, "mode": "max", "max_norm": 0.5, "norm_type": 1.0},
    {"budget": 1.0, "mode": "sum", "padding_idx": -1, "include_last_offset": True, "weighted": True},
]


@pytest.mark.parametrize("training", ["dense", "fused"])
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_every_layout_and_bag_compiles_into_one_graph(case: dict[str, Any], training: str) -> None:
    torch.compiler.reset()
    options = {name: value for name, value in case.items() if name not in ("weighted", "optimizer")}
    update = {"lr": 0.5, "optimizer": case.get("optimizer", "adagrad")} if training == "fused" else {}
    torch.manual_seed(4)
    eager = AdaptiveEmbeddingBag(30, 16, chunk_dim=4, training=training, **options, **update)
    eager._take(torch.randn(30, 16))
    compiled = copy.deepcopy(eager)
    before = eager.weight.clone()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for step in range(3):
        ids, offsets = torch.randint(0, 30, (20 + step,)), torch.tensor([0, 4, 4, 11])
        given = [torch.rand(20 + step).requires_grad_() if "weighted" in case else None]
        given.append(None if given[0] is None else given[0].detach().clone().requires_grad_())
        outputs = [module(ids, offsets, weights) for module, weights in zip((eager, run), given, strict=True)]
        assert torch.equal(*outputs)
        for module, output, weights in zip((eager, compiled), outputs, given, strict=True):
            output.square().sum().backward()
            assert weights is None or weights.grad is not None
            if training == "dense":
                torch.optim.SGD([module.pool], lr=0.1).step()
                module.zero_grad()
        if given[0] is not None and given[1] is not None:
            assert torch.equal(given[0].grad, given[1].grad)
        if eager.layout != "identity":
            for module in (eager, compiled):
                module.prune(optimizer=torch.optim.SGD([module.pool]) if training == "dense" else None)
    assert not torch.equal(eager.weight, before)
    for name, value in eager.state_dict().items():
        assert torch.equal(compiled.state_dict()[name], value), name


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
