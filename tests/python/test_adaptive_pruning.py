"""Tables of which only a budget of chunks is resident, against a reference in plain Python that masks a dense table."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner
from torchext.nn._ops import _ops


class Reference:
    """FIITED with masks: every chunk has values; those outside the mask read as zero and are not trained."""

    def __init__(self, rows: int, chunks: int, width: int, capacity: int, lr: float, gamma: float) -> None:
        self.rows, self.chunks, self.width, self.capacity = rows, chunks, width, capacity
        self.lr, self.gamma = lr, gamma
        keys = range(rows * chunks)
        self.values = {key: [0.0] * width for key in keys}
        self.sums = dict.fromkeys(keys, 0.0)
        self.utility = dict.fromkeys(keys, 0.0)
        self.resident: set[int] = set()

    def bag(self, ids: list[int]) -> list[float]:
        out = [0.0] * (self.chunks * self.width)
        for row in ids:
            for chunk in range(self.chunks):
                key = row * self.chunks + chunk
                if key in self.resident:
                    for i, value in enumerate(self.values[key]):
                        out[chunk * self.width + i] += value
        return out

    def train(self, bags: list[list[int]], upstream: list[list[float]]) -> None:
        gradients: dict[int, list[float]] = {}
        accesses: dict[int, int] = {}
        for ids, gradient in zip(bags, upstream, strict=True):
            for row in ids:
                accesses[row] = accesses.get(row, 0) + 1
                total = gradients.setdefault(row, [0.0] * len(gradient))
                for i, value in enumerate(gradient):
                    total[i] += value
        for key in self.utility:
            self.utility[key] *= self.gamma
        for row, gradient in gradients.items():
            for chunk in range(self.chunks):
                key = row * self.chunks + chunk
                part = gradient[chunk * self.width : (chunk + 1) * self.width]
                squares = sum(value * value for value in part)
                self.utility[key] += accesses[row] * math.sqrt(squares)
                if key in self.resident:
                    self.sums[key] += squares / self.width
                    rate = self.lr / (math.sqrt(self.sums[key]) + 1e-8)
                    self.values[key] = [w - rate * g for w, g in zip(self.values[key], part, strict=True)]

    def prune(self) -> None:
        order = sorted(self.utility, key=lambda key: (-self.utility[key], key not in self.resident, key))
        chosen = [key for key in order if self.utility[key] > 0 or key in self.resident][: self.capacity]
        for key in set(chosen) - self.resident:
            self.values[key], self.sums[key] = [0.0] * self.width, 0.0
        self.resident = set(chosen)

    def weight(self) -> Tensor:
        made = torch.zeros(self.rows * self.chunks, self.width, dtype=torch.float64)
        for key in self.resident:
            made[key] = torch.tensor(self.values[key], dtype=torch.float64)
        return made.view(self.rows, -1)


@pytest.mark.parametrize("training", ["fused", "sparse", "dense"])
@pytest.mark.parametrize("layout", ["direct", "hash"])
def test_training_equals_the_masked_reference(layout: str, training: str) -> None:
    torch.manual_seed(0)
    rows, chunks, width, budget = 12, 3, 4, 11
    bag = AdaptiveEmbeddingBag(
        rows,
        chunks * width,
        mode="sum",
        budget=budget,
        chunk_dim=width,
        layout=layout,
        training=training,
        lr=0.1 if training == "fused" else 0.01,
        init_std=0.0,
        dtype=torch.float64,
    )
    # Not coded: a byte's rounding would choose other chunks than the reference.
    bag.utility = torch.zeros(rows * chunks)
    reference = Reference(rows, chunks, width, budget, 0.1, 0.99)
    # Row-wise Adagrad in torch's words, where an optimizer trains the pool.
    sums = torch.zeros(budget, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    target = torch.randn(5, chunks * width, dtype=torch.float64)
    for step in range(60):
        bags = [[int(i) for i in torch.randint(0, 6 + step % 7, (n,))] for n in (0, 1, 3, 4, 2)]
        flat = torch.tensor([row for ids in bags for row in ids], dtype=torch.int64)
        offsets = torch.tensor([0, 0, 1, 4, 8])
        output = bag(flat, offsets)
        expected = torch.tensor([reference.bag(ids) for ids in bags], dtype=torch.float64)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-9)
        (output - target).square().sum().backward()
        reference.train(bags, (2 * (expected - target)).tolist())
        if training != "fused":
            gradient = bag.pool.grad
            assert gradient is not None
            if training == "sparse":
                assert gradient.is_sparse
                gradient = gradient.to_dense()
            sums += gradient.square().mean(1, keepdim=True)
            bag.pool.data -= 0.1 * gradient / (sums.sqrt() + 1e-8)
            optimizer.state[bag.pool]["sums"] = sums.expand(-1, width).clone()
            bag.zero_grad()
        torch.testing.assert_close(bag.weight, reference.weight(), rtol=1e-5, atol=1e-8)
        observed = bag.utility.double() / bag.clock[1]
        torch.testing.assert_close(
            observed, torch.tensor(list(reference.utility.values()), dtype=torch.float64), rtol=1e-4, atol=1e-6
        )
        if step % 4 == 3:
            bag.prune(optimizer=optimizer)
            reference.prune()
            if training != "fused":
                sums = optimizer.state[bag.pool]["sums"][:, :1].clone()
            torch.testing.assert_close(bag.weight, reference.weight(), rtol=1e-5, atol=1e-8)
            assert bag.stats()["resident_chunks"] == len(reference.resident) <= budget


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


def test_an_optimizer_keeps_its_state_with_the_chunks() -> None:
    torch.manual_seed(2)
    bag = AdaptiveEmbeddingBag(30, 16, mode="sum", budget=0.3, chunk_dim=4, sparse=True, init_std=0.0)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer: an optimizer trains the pools"):
        ChunkPruner(bag)
    pruner = ChunkPruner(nn.Sequential(bag), optimizer=optimizer, first=1, interval=3)
    held: dict[int, Tensor] = {}
    for step in range(40):
        bag((torch.rand(20, 3) ** 2 * (30 - step // 4)).long()).sub(1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        keys, slots = bag._resident()
        moment = optimizer.state[bag.pool].get("exp_avg")
        held = {} if moment is None else {int(k): moment[s].clone() for k, s in zip(keys, slots, strict=True)}
        if pruner.step() is not None and moment is not None:
            moment = optimizer.state[bag.pool]["exp_avg"]
            for key, slot in zip(*bag._resident(), strict=True):
                expected = held.get(int(key), torch.zeros(4))
                assert torch.equal(moment[slot], expected)
    assert len(held) > 10


def test_an_optimizer_whose_state_cannot_move_is_refused() -> None:
    table = AdaptiveEmbedding(30, 16, budget=0.3, chunk_dim=4)
    other = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="optimizer = SGD: a pool is not among its parameters"):
        ChunkPruner(table, optimizer=torch.optim.SGD([other], lr=0.1))
    optimizer = torch.optim.SGD([other, table.pool], lr=0.1)
    pruner = ChunkPruner(table, optimizer=optimizer)
    table(torch.arange(30)).sum().backward()
    before = copy.deepcopy(table.state_dict())
    optimizer.state[table.pool].update(step=torch.ones(1), rows=torch.zeros(36, 1))
    with pytest.raises(ValueError, match=r"state 'rows' has shape \(36, 1\), the pool \(36, 4\).*form='replicated'"):
        pruner.prune()
    assert all(torch.equal(value, before[name]) for name, value in table.state_dict().items())
    del optimizer.state[table.pool]["rows"]
    assert pruner.prune()["admitted"] == 36


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_from_pretrained_keeps_the_largest(layout: str) -> None:
    torch.manual_seed(3)
    dense = torch.randn(40, 12) * torch.rand(40, 1)
    bag = AdaptiveEmbeddingBag.from_pretrained(dense, budget=0.25, chunk_dim=4, layout=layout)
    assert not bag.pool.requires_grad
    norms = dense.view(120, 4).norm(dim=1)
    kept = norms >= norms.sort(descending=True).values[29]
    assert torch.equal(bag.weight.view(120, 4), dense.view(120, 4) * kept.unsqueeze(1))
    whole = AdaptiveEmbedding.from_pretrained(dense, freeze=False)
    assert torch.equal(whole.weight, dense)
    assert whole.pool.requires_grad
    with pytest.raises(ValueError, match="must be 2-D"):
        AdaptiveEmbeddingBag.from_pretrained(dense[0])


def trained(layout: str = "hash", **options: Any) -> AdaptiveEmbeddingBag:
    torch.manual_seed(4)
    given = {"budget": 0.3, "chunk_dim": 4, "layout": layout, "training": "fused", "optimizer": "adam", **options}
    bag = AdaptiveEmbeddingBag(50, 8, **given)
    for _ in range(5):
        bag(torch.randint(0, 50, (10, 4))).sub(1).square().sum().backward()
        bag.prune()
    return bag


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_a_checkpoint_goes_on_bit_by_bit(layout: str) -> None:
    bag = trained(layout)
    twin = AdaptiveEmbeddingBag(50, 8, budget=0.3, chunk_dim=4, layout=layout, training="fused", optimizer="adam")
    twin.load_state_dict(bag.state_dict())
    for module in (bag, twin):
        torch.manual_seed(5)
        for _ in range(5):
            module(torch.randint(0, 50, (10, 4))).sub(1).square().sum().backward()
            module.prune()
    for name, value in bag.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name


@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
def test_a_frozen_table_takes_a_checkpoint_with_another_size(training: str) -> None:
    torch.manual_seed(8)
    options: dict[str, Any] = {"chunk_dim": 4, "layout": "hash", "training": training}
    frozen = AdaptiveEmbedding.from_pretrained(torch.randn(50, 8), budget=20, **options)
    names = set(frozen.state_dict())
    frozen.reset_parameters()
    assert set(frozen.state_dict()) == names
    large = AdaptiveEmbedding.from_pretrained(torch.randn(50, 8), budget=30, freeze=False, **options)
    frozen.load_state_dict(large.state_dict())
    assert torch.equal(frozen.weight, large.weight)
    assert set(frozen.state_dict()) == names


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    bag, other = trained(), trained(budget=0.4)
    before = {name: value.clone() for name, value in bag.state_dict().items()}

    def refused(state: dict[str, Any], text: str) -> None:
        with pytest.raises(RuntimeError, match=text):
            bag.load_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())

    state = bag.state_dict()
    for name, wrong, text in (
        ("seen", state["seen"][:3], r"\(3,\), allowed \(7,\)"),
        ("index", state["index"][:-1], r"\(49,\), allowed 50\.\.150"),
        ("utility", state["utility"][1:], r"\(99,\), allowed \(100,\)"),
        ("state.1", state["state.1"][1:], r"\(29, 4\), allowed 30\.\.30"),
        ("pool", torch.zeros(101, 4), r"\(101, 4\), allowed 0\.\.100"),
        ("pool", torch.zeros(30, 5), r"\(30, 5\), allowed 0\.\.100 as its first size, then \(4,\)"),
        ("pool", torch.zeros(()), r"\(\), allowed"),
    ):
        refused({**state, name: wrong}, f"{name}: saved with shape {text}")
    refused(
        {**other.state_dict(), "state.0": state["state.0"]}, r"state.0: saved with shape \(30, 4\), allowed 40\.\.40"
    )
    refused({**state, "index": state["index"].int()}, "index: saved as torch.int32, the table has torch.int64")
    refused({name: value for name, value in state.items() if name != "clock"}, "Missing key.*clock")
    refused({**state, "surplus": state["clock"]}, "Unexpected key.*surplus")
    refused({"weight": torch.zeros(49, 8)}, r"embeddings have shape \(49, 8\); the table is \(50, 8\)")
    newer = bag.state_dict()
    newer._metadata[""]["version"] = 2  # type: ignore[attr-defined]
    refused(newer, "saved as version 2, this is version 1")
    # Another number of slots is another share of a common budget: taken over.
    bag.load_state_dict(other.state_dict())
    assert torch.equal(bag.weight, other.weight)
    assert bag.budget_chunks == other.budget_chunks


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_a_pool_that_is_back_at_its_size_takes_its_own_checkpoint(layout: str) -> None:
    bag, fresh = (
        trained(layout),
        AdaptiveEmbeddingBag(50, 8, budget=0.3, chunk_dim=4, layout=layout, training="fused", optimizer="adam"),
    )
    bag.prune(capacity=90)
    bag.prune(capacity=30)
    fresh.load_state_dict(bag.state_dict())
    torch.manual_seed(5)
    ids = torch.randint(0, 50, (10, 4))
    for module in (bag, fresh):
        module(ids).sub(1).square().sum().backward()
        module.prune(capacity=40)
    for name, value in bag.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_tables_share_a_budget(layout: str) -> None:
    torch.manual_seed(6)
    options: dict[str, Any] = {"chunk_dim": 4, "layout": layout, "training": "fused", "mode": "sum", "init_std": 0.0}
    busy = AdaptiveEmbeddingBag(200, 16, budget=50, **options)
    idle = AdaptiveEmbeddingBag(200, 8, budget=50, **options)
    pruner = ChunkPruner([busy, idle], first=1, interval=4, shared_budget=100, max_swap_share=1.0)
    for step in range(60):
        busy(torch.randint(0, 30, (64, 4))).sub(1).square().sum().backward()
        # A gradient of another size altogether does not decide: utilities are relative to their table.
        (idle(torch.randint(0, 3, (64, 1))).sub(1).square().sum() * 1e6).backward()
        weights = [table.weight.clone() for table in (busy, idle)]
        if pruner.step() is not None and step > 8:
            for table, before in zip((busy, idle), weights, strict=True):
                kept = table.weight.view(-1, 4).abs().sum(1) > 0
                assert torch.equal(table.weight.view(-1, 4)[kept], before.view(-1, 4)[kept])
        assert busy.budget_chunks + idle.budget_chunks == 100
    assert idle.stats()["resident_chunks"] == 6  # all that it uses
    assert busy.stats()["resident_chunks"] >= 85
    with pytest.raises(ValueError, match="shared_budget needs tables with one chunk_dim"):
        ChunkPruner([busy, AdaptiveEmbeddingBag(9, 16, budget=2, chunk_dim=8)], shared_budget=9)


@pytest.mark.parametrize("sparse", [False, True])
def test_pools_that_an_optimizer_trains_share_a_budget_in_an_ordinary_loop(sparse: bool) -> None:
    torch.manual_seed(0)
    first, second = (AdaptiveEmbedding(50, 16, budget=30, chunk_dim=4, sparse=sparse) for _ in range(2))
    optimizer = torch.optim.SGD([first.pool, second.pool], lr=0.01)
    pruner = ChunkPruner([first, second], optimizer=optimizer, first=2, interval=2, growth=1.0, shared_budget=60)
    sizes = set()
    loss = torch.zeros(())
    for _ in range(20):
        optimizer.zero_grad()
        ids = torch.randint(0, 50, (24,))
        # The last step's loss, and with it the last step's graph, lives until this one's is there.
        loss = (3 * first(ids) + second(ids) - 1).square().sum()
        loss.backward()
        for table in (first, second):
            assert table.pool.grad is not None
            assert table.pool.grad.shape == table.pool.shape
        optimizer.step()
        pruner.step()
        sizes.add(first.budget_chunks)
    assert len(sizes) > 1
    assert loss.isfinite()


def test_a_checkpoint_with_another_size_is_trained_on() -> None:
    small, large = (AdaptiveEmbedding(50, 16, budget=budget, chunk_dim=4, layout="hash") for budget in (20, 30))
    held = small(torch.arange(50)).sum()
    small.load_state_dict(large.state_dict())
    small(torch.arange(50)).sum().backward()
    assert held.requires_grad
    assert small.pool.grad is not None
    assert small.pool.grad.shape == (30, 4)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"first": 0}, ValueError, "first = 0"),
        ({"first": 1.5}, TypeError, "first = 1.5 is a float; it must be an int, 1 or more"),
        ({"growth": 0.5}, ValueError, "growth = 0.5"),
        ({"growth": math.inf}, ValueError, "growth = inf: allowed 1 or more, finite"),
        ({"interval": 3}, ValueError, "interval = 3: allowed first = 16 or more"),
        ({"interval": "x"}, TypeError, "interval = 'x' is a str"),
        ({"max_swap_share": 0.0}, ValueError, "max_swap_share = 0.0"),
        ({"hysteresis": -1.0}, ValueError, "hysteresis = -1.0"),
        ({"hysteresis": math.nan}, ValueError, "hysteresis = nan"),
        ({"shared_budget": 10**6}, ValueError, "shared_budget = 1000000: allowed 1..100 chunks"),
        (
            {"shared_budget": 30.5},
            TypeError,
            "shared_budget = 30.5 is a float; it must be an int, 1..100 chunks, or None",
        ),
        ({"optimizer": 3}, TypeError, "optimizer = 3 is a int; it must be the torch.optim.Optimizer that trains"),
    ],
)
def test_bad_pruners_are_named(options: dict[str, Any], kind: type[BaseException], text: str) -> None:
    with pytest.raises(kind) as caught:
        ChunkPruner(trained(), **options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ({}, ValueError, r"state lacks \['steps', 'next', 'wait'\]"),
        ({"steps": 1, "next": 2}, ValueError, r"state lacks \['wait'\]"),
        ({"steps": -1, "next": 2, "wait": 2.0}, ValueError, r"state\['steps'\] = -1: allowed 0 or more"),
        ({"steps": 9, "next": 0, "wait": 2.0}, ValueError, r"state\['next'\] = 0: allowed 1 or more"),
        ({"steps": 9, "next": 12, "wait": "x"}, TypeError, r"state\['wait'\] = 'x' is a str"),
        ({"steps": 9, "next": 12, "wait": math.inf}, ValueError, r"state\['wait'\] = inf"),
        (3, TypeError, r"state is a int; it must be what ChunkPruner.state_dict\(\) returned"),
    ],
    ids=str,
)
def test_bad_states_of_pruners_are_named_and_change_nothing(state: Any, kind: type[BaseException], text: str) -> None:
    pruner = ChunkPruner(trained())
    before = pruner.state_dict()
    with pytest.raises(kind, match=text):
        pruner.load_state_dict(state)
    assert pruner.state_dict() == before


def test_pruners_need_something_to_prune() -> None:
    with pytest.raises(ValueError, match="no AdaptiveEmbedding"):
        ChunkPruner(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"budget 1\.0 keep everything and need no ChunkPruner"):
        ChunkPruner(AdaptiveEmbedding(10, 8))
    with pytest.raises(TypeError, match=r"modules: 3 is a int"):
        ChunkPruner([trained(), 3])  # type: ignore[list-item]
    assert len(ChunkPruner([trained(), AdaptiveEmbedding(10, 8)]).tables) == 1
    with pytest.raises(ValueError, match="max_swaps = -1"):
        trained().prune(max_swaps=-1)
    with pytest.raises(ValueError, match=r"capacity = 101: allowed 0\.\.100"):
        trained().prune(capacity=101)


def test_the_schedule_is_early_and_often_then_rare() -> None:
    pruner = ChunkPruner(trained(), first=2, growth=2.0, interval=10)
    pruned = [step for step in range(1, 60) if pruner.step() is not None]
    assert pruned == [2, 6, 14, 24, 34, 44, 54]
    again = ChunkPruner(trained(), first=2, growth=2.0, interval=10)
    again.load_state_dict(pruner.state_dict())
    assert [step for step in range(60, 80) if again.step() is not None] == [64, 74]
