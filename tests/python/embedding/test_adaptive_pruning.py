"""Tables of which only a budget of chunks is resident: training, pruning, and the operators that move chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from adaptive_reference import Reference
from adaptive_tables import RowwiseAdagrad

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner
from torchext.nn.operators import _ops

TRAINED = [
    *(("fused", optimizer) for optimizer in ("sgd", "adagrad", "adam")),
    *(("sparse", optimizer) for optimizer in ("sgd", "adagrad", "adam")),
    *(("dense", optimizer) for optimizer in ("sgd", "adagrad")),  # torch's dense Adam moves what has no gradient
]
BAGS: list[dict[str, Any]] = [
    {"mode": "sum"},
    {"mode": "sum", "padding_idx": 2, "weighted": True},
    {"mode": "mean", "padding_idx": 2},
    {"mode": "max", "padding_idx": 2},
]
# Every way to train with every kind of bag, layouts in turn.
CASES = [
    (("direct", "hash", "sketch")[number % 3], *case) for number, case in enumerate(itertools.product(TRAINED, BAGS))
]


def named(part: Any) -> str:
    """A part of a case, in a test's name."""
    return part if isinstance(part, str) else "-".join(map(str, part.values() if isinstance(part, dict) else part))


@pytest.mark.parametrize(("layout", "trained", "bags"), CASES, ids=named)
def test_training_equals_the_masked_reference(layout: str, trained: tuple[str, str], bags: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rows, chunks, width, budget = 12, 3, 4, 11
    training, name = trained
    weighted, mode, padding = "weighted" in bags, bags["mode"], bags.get("padding_idx")
    update: dict[str, Any] = {"optimizer": name, "lr": 0.1} if training == "fused" else {}
    bag = AdaptiveEmbeddingBag(
        rows,
        chunks * width,
        mode=mode,
        padding_idx=padding,
        budget=budget,
        chunk_dim=width,
        layout=layout,
        training=training,
        init_std=0.0,
        dtype=torch.float64,
        **update,
    )
    if layout != "sketch":  # not coded: a byte's rounding would choose other chunks than the reference
        bag.utility = torch.zeros(rows * chunks)
    reference = Reference(rows, chunks, width, budget, 0.1, 0.99, optimizer=name, mode=mode, padding=padding)
    optimizer: torch.optim.Optimizer | None = None
    if training != "fused":
        optimizer = {
            "sgd": lambda pool: torch.optim.SGD(pool, lr=0.1),
            "adagrad": lambda pool: RowwiseAdagrad(pool, width, lr=0.1),
            "adam": lambda pool: torch.optim.SparseAdam(pool, lr=0.1),
        }[name](bag.parameters())
    target = torch.randn(5, chunks * width, dtype=torch.float64)
    admitted = 0
    for step in range(40):
        ids = [[int(i) for i in torch.randint(0, 6 + step % 7, (n,))] for n in (0, 1, 3, 4, 2)]
        flat = torch.tensor([row for own in ids for row in own])
        weights = torch.rand(10, dtype=torch.float64, requires_grad=True) if weighted else None
        shares = None if weights is None else [part.tolist() for part in weights.detach().split([0, 1, 3, 4, 2])]
        output = bag(flat, torch.tensor([0, 0, 1, 4, 8]), weights)
        made = [reference.bag(own, None if shares is None else shares[at]) for at, own in enumerate(ids)]
        expected = torch.tensor(made, dtype=torch.float64)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-9)
        (output - target).square().sum().backward()
        upstream = (2 * (expected - target)).tolist()
        if weights is not None:
            of_weights = [reference.weight_gradient(*pair) for pair in zip(ids, upstream, strict=True)]
            torch.testing.assert_close(weights.grad, torch.tensor([*itertools.chain(*of_weights)], dtype=torch.float64))
        reference.train(ids, upstream, shares)
        if optimizer is not None:
            assert bag.pool.grad is not None and bag.pool.grad.is_sparse == (training == "sparse")
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(bag.weight, reference.weight(), rtol=1e-5, atol=1e-8)
        if layout != "sketch":
            observed = bag.utility.double() / bag.clock[1]
            wanted = torch.tensor(list(reference.utility.values()), dtype=torch.float64)
            torch.testing.assert_close(observed, wanted, rtol=1e-4, atol=1e-6)
        if step % 4 == 3:
            admitted += bag.prune(optimizer=optimizer)["admitted"]
            if layout == "sketch":  # what it forgets is its own: only what is resident then trains as in the reference
                reference.hold(set(bag._resident()[0].tolist()))
            else:
                reference.prune()
            torch.testing.assert_close(bag.weight, reference.weight(), rtol=1e-5, atol=1e-8)
            assert bag.stats()["resident_chunks"] == len(reference.resident) <= budget
    assert admitted > budget  # some have left, and others came


@pytest.mark.parametrize(
    ("budget", "layout"),
    [
        *((256, "identity"), (1.0, "identity"), (255, "direct")),
        *((32, "direct"), (1 / 8, "direct"), (31, "hash")),  # from 1/8 of 256 chunks
        *((8, "hash"), (1 / 32, "hash"), (7, "sketch"), (1, "sketch")),  # from 1/32
    ],
)
def test_the_budget_chooses_the_layout(budget: float, layout: str) -> None:
    table = AdaptiveEmbedding(64, 16, budget=budget, chunk_dim=4)
    assert table.layout == table.stats()["layout"] == layout


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_a_layout_that_is_named_is_taken_unless_everything_is_resident(layout: str) -> None:
    made = [AdaptiveEmbedding(64, 16, budget=budget, chunk_dim=4, layout=layout).layout for budget in (1, 255, 256)]
    assert made == [layout, layout, "identity"]


@pytest.mark.parametrize(
    ("budget", "layout", "a_row"), [(1 / 4, "direct", 100.1), (1 / 16, "hash", 24.0), (1 / 64, "sketch", 5.3)]
)
def test_bytes_a_row_are_those_of_the_docs(budget: float, layout: str, a_row: float) -> None:
    stats = AdaptiveEmbeddingBag(8000, 64, budget=budget, training="fused").stats()
    assert stats["layout"] == layout
    assert stats["bytes"] / 8000 == pytest.approx(a_row, rel=0.01)


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_the_popular_become_wide_and_the_budget_holds(layout: str) -> None:
    torch.manual_seed(1)
    bag = AdaptiveEmbeddingBag(
        500, 16, mode="sum", budget=0.1, chunk_dim=4, layout=layout, training="fused", init_std=0.01
    )
    pruner = ChunkPruner(bag, first=2, interval=10, max_swap_share=0.25)
    for popular in (torch.arange(0, 20), torch.arange(300, 320)):  # what is popular changes
        for _ in range(300):
            rare = torch.randint(0, 500, (32, 1))
            often = popular[torch.randint(0, 20, (32, 4))]
            bag(torch.cat([rare, often], 1)).add(1).square().sum().backward()
            pruner.step()
            assert bag.stats()["resident_chunks"] <= 200 == bag.budget_chunks
        widths = (bag.weight.view(500, 4, 4).abs().sum(2) > 0).sum(1)
        assert widths[popular].double().mean() > 3.5, widths[popular]
    stats = bag.stats()
    assert sum(stats["width_histogram"]) == 500
    assert sum(width * rows for width, rows in enumerate(stats["width_histogram"])) == stats["resident_chunks"]
    assert stats["value_bytes"] == 200 * 16
    per_table = {"direct": 2000 * 8, "hash": 2000 + 8 * (200 + 85 + 8), "sketch": 200 + 100 * 5 + 8 * (200 + 85 + 8)}
    assert stats["bytes"] == 200 * 20 + per_table[layout] + 63 + 16 + 8
    assert stats["dense_value_bytes"] == 500 * 64


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_gradients_that_a_scaler_multiplied_are_told_apart(layout: str) -> None:
    table = AdaptiveEmbedding(20, 4, budget=10, chunk_dim=4, layout=layout)
    upstream = torch.ones(20, 4)
    upstream[10:] = 8
    for _ in range(300):
        table(torch.arange(20)).backward(2.0**16 * upstream)
    table.prune()
    useful = (table._resident()[0] >= 10).sum()
    assert useful >= (8 if layout == "sketch" else 10)  # there two pairs of rows share a cell, and wear each other down


def test_admitted_chunks_start_afresh() -> None:
    bag = AdaptiveEmbeddingBag(4, 8, mode="sum", budget=2, chunk_dim=4, training="fused", layout="direct", seed=3)

    def want(row: int, chunk: int) -> None:
        bag.utility.zero_()
        bag.utility[row * 2 + chunk] = 1
        bag.prune(capacity=1)

    want(0, 0)
    first = bag.weight[0, :4].clone()
    assert first.abs().sum() > 0  # the row's first chunk: normal
    want(0, 1)
    assert not bag.weight.any()  # a known row's chunk: zeros
    want(0, 0)
    assert not bag.weight.any()  # forgotten
    want(2, 1)
    assert bag.weight[2, 4:].abs().sum() > 0
    assert bag.state[0].tolist() == [0.0]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize(("budget", "layout"), [(1.0, "auto"), (0.5, "direct"), (0.5, "hash"), (0.5, "sketch")])
def test_a_reset_table_starts_over(budget: float, layout: str, optimizer: str) -> None:
    def fresh() -> AdaptiveEmbeddingBag:
        return AdaptiveEmbeddingBag(
            20, 8, budget=budget, chunk_dim=4, layout=layout, training="fused", optimizer=optimizer
        )

    bag = fresh()
    for _ in range(3):
        bag(torch.arange(20).view(5, 4)).square().sum().backward()
        bag.prune()
    torch.manual_seed(2)
    bag.reset_parameters()
    torch.manual_seed(2)
    for name, value in fresh().state_dict().items():
        assert torch.equal(bag.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_contents_are_carried_in_the_order_of_moves(dtype: torch.dtype) -> None:
    values = torch.arange(100, dtype=dtype).view(50, 2)
    before = values.clone()
    moves = torch.tensor([[slot, slot - 1] for slot in range(1, 48)])  # each into the slot that the last one left
    _ops.adaptive_table_carry_(values, moves, torch.tensor([[7, 47], [9, 48]]))
    assert torch.equal(values[:47], before[1:48])
    assert not values[47:49].any()
    assert torch.equal(values[49], before[49])


def test_carrying_outside_of_the_pool_is_refused() -> None:
    values, none = torch.ones(3, 2), torch.empty(0, 2, dtype=torch.int64)
    with pytest.raises(IndexError, match=r"moves\[1\] has slot 3; allowed 0\.\.2"):
        _ops.adaptive_table_carry_(values, torch.tensor([[0, 1], [3, 0]]), none)
    with pytest.raises(IndexError, match=r"admitted\[0\] has slot -1; allowed 0\.\.2"):
        _ops.adaptive_table_carry_(values, none, torch.tensor([[7, -1]]))
    with pytest.raises(TypeError, match="moves is Int; it must be Long"):
        _ops.adaptive_table_carry_(values, none.int(), none)
    with pytest.raises(ValueError, match="values must be contiguous, a slot a row"):
        _ops.adaptive_table_carry_(values.t(), none, none)
    assert torch.equal(values, torch.ones(3, 2))


def test_rows_are_new_once() -> None:
    seen = torch.tensor([0b00000010, 0], dtype=torch.uint8)  # row 1 was seen; 3 chunks a row
    admitted = torch.tensor([[1, 10], [2, 11], [3, 12], [29, 13]])
    assert _ops.adaptive_table_meet_(seen, admitted, 3).tolist() == [10, 11, 13]
    assert seen.tolist() == [0b00000011, 0b00000010]
    assert _ops.adaptive_table_meet_(seen, admitted, 3).tolist() == []
    with pytest.raises(IndexError, match=r"admitted\[1\] has key 48; allowed 0\.\.47"):
        _ops.adaptive_table_meet_(seen, torch.tensor([[6, 0], [48, 1]]), 3)
    assert seen.tolist() == [0b00000011, 0b00000010]
