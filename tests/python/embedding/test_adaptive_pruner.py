"""ChunkPruner: its schedule and state, optimizers of the pools, a budget that tables share."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from adaptive_tables import trained
from torch import Tensor, nn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner
from torchext.nn.table_options import mixed_seed


def test_the_schedule_is_early_and_often_then_rare() -> None:
    pruner = ChunkPruner(trained(), first=2, growth=2.0, interval=10)
    pruned = [step for step in range(1, 60) if pruner.step() is not None]
    assert pruned == [2, 6, 14, 24, 34, 44, 54]
    again = ChunkPruner(trained(), first=2, growth=2.0, interval=10)
    again.load_state_dict(pruner.state_dict())
    assert [step for step in range(60, 80) if again.step() is not None] == [64, 74]


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


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_sparse_gradients_moves_with_the_chunks(nesterov: bool) -> None:
    """Torch's SGD keeps it sparse."""
    torch.manual_seed(3)
    table = AdaptiveEmbeddingBag(50, 16, mode="sum", budget=0.3, chunk_dim=4, sparse=True, init_std=0.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    pruner = ChunkPruner(table, optimizer=optimizer, max_swap_share=0.3, hysteresis=0.0)
    moved = 0
    for step in range(8):
        table((torch.rand(64, 3) ** 2 * (50 - 4 * step)).long()).sub(1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moment = optimizer.state[table.pool]["momentum_buffer"]
        assert moment.is_sparse
        held = {int(key): moment.to_dense()[slot] for key, slot in zip(*table._resident(), strict=True)}
        moved += pruner.prune()["moved"] + pruner.prune()["admitted"]
        moment = optimizer.state[table.pool]["momentum_buffer"].to_dense()
        for key, slot in zip(*table._resident(), strict=True):
            assert torch.equal(moment[slot], held.get(int(key), torch.zeros(4)))
    assert moved > 0


@pytest.mark.parametrize("kind", ["adagrad", "rprop", "rmsprop"])
def test_state_of_admitted_chunks_begins_as_the_optimizer_begins(kind: str) -> None:
    torch.manual_seed(3)
    table = AdaptiveEmbeddingBag(50, 16, mode="sum", budget=0.3, chunk_dim=4, init_std=0.0)
    optimizer, name, beginning = {
        "adagrad": (torch.optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=0.25), "sum", 0.25),
        "rprop": (torch.optim.Rprop(table.parameters(), lr=0.125), "step_size", 0.125),
        "rmsprop": (torch.optim.RMSprop(table.parameters()), "square_avg", 0.0),
    }[kind]
    pruner = ChunkPruner(table, optimizer=optimizer, max_swap_share=0.3, hysteresis=0.0)
    admitted = 0
    for step in range(6):
        table((torch.rand(64, 3) ** 2 * (50 - 4 * step)).long()).sub(1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state[table.pool][name]
        held = {int(key): state[slot].clone() for key, slot in zip(*table._resident(), strict=True)}
        pruner.prune()
        state = optimizer.state[table.pool][name]
        for key, slot in zip(*table._resident(), strict=True):
            admitted += int(key) not in held
            assert torch.equal(state[slot], held.get(int(key), torch.full((4,), beginning)))
    assert admitted > 0


def test_the_state_of_a_frozen_table_moves_with_its_chunks() -> None:
    torch.manual_seed(0)
    table = AdaptiveEmbeddingBag(64, 16, chunk_dim=4, budget=64, mode="sum", init_std=0.0)
    optimizer = torch.optim.Adam(table.parameters())
    pruner = ChunkPruner(table, optimizer=optimizer, max_swap_share=0.3, hysteresis=0.0)

    def moments() -> dict[int, Tensor]:
        moment = optimizer.state[table.pool]["exp_avg"]
        return {int(key): moment[slot].clone() for key, slot in zip(*table._resident(), strict=True)}

    moved = 0
    for _ in range(8):
        optimizer.zero_grad()
        table(torch.randint(0, 64, (8, 4))).sub(1).square().sum().backward()
        optimizer.step()
        held = moments()
        table.requires_grad_(False)
        done = pruner.prune()
        table.requires_grad_(True)
        moved += done["moved"] + done["dropped"]
        for key, moment in moments().items():
            assert torch.equal(moment, held.get(key, torch.zeros(4))), key
    assert moved > 20


def test_state_of_a_frozen_table_of_another_size_is_named_when_it_is_thawed() -> None:
    table = AdaptiveEmbedding.from_pretrained(torch.randn(50, 16), freeze=False, budget=30, chunk_dim=4, layout="hash")
    other = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([table.pool, other], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (table(torch.arange(50)).sum() + other.sum()).backward()
        optimizer.step()

    step()
    table.requires_grad_(False)
    table.prune(capacity=20)  # without the optimizer
    step()
    table.requires_grad_(True)
    with pytest.raises(ValueError, match=r"state 'exp_avg' is of 30 slots, the table has a pool of 20 since"):
        step()


def test_a_table_that_is_thawed_after_its_pruner_was_made_needs_an_optimizer() -> None:
    table = AdaptiveEmbedding(30, 16, budget=0.3, chunk_dim=4).requires_grad_(False)
    pruners = [ChunkPruner(table), ChunkPruner(table, optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(2))]))]
    assert pruners[0].prune()["admitted"] == 0
    assert pruners[1].prune()["admitted"] == 0
    table.requires_grad_(True)
    table(torch.arange(30)).sum().backward()
    before = copy.deepcopy(table.state_dict())
    for pruner, text in zip(pruners, ("an optimizer trains the pools", "a pool is not among its"), strict=True):
        with pytest.raises(ValueError, match=text):
            pruner.prune()
    assert all(torch.equal(value, before[name]) for name, value in table.state_dict().items())
    assert ChunkPruner(table, optimizer=torch.optim.SGD(table.parameters())).prune()["admitted"] == 36


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


def test_tables_of_one_seed_that_are_pruned_together_begin_with_other_values() -> None:
    tables = [AdaptiveEmbeddingBag(64, 16, chunk_dim=4, budget=200, mode="sum", training="fused") for _ in range(3)]
    ids = torch.arange(64).view(-1, 1)
    for table in tables:
        table(ids).sum().backward()
    ChunkPruner(nn.ModuleList(tables)).prune()
    for table in tables[1:]:
        assert table.stats()["resident_chunks"] == tables[0].stats()["resident_chunks"] == 200
        assert not (table.pool == tables[0].pool).any()
        assert torch.nn.functional.cosine_similarity(table.pool, tables[0].pool).mean().abs() < 0.15


def test_a_table_that_is_pruned_twice_in_a_step_begins_with_other_values_each_time() -> None:
    table = AdaptiveEmbeddingBag(64, 4, chunk_dim=4, budget=20, mode="sum", training="fused")
    table(torch.arange(64).view(-1, 1)).sum().backward()
    table.prune()
    table.prune(capacity=40)
    assert len(table.pool.unique()) == 160


def test_seeds_are_well_mixed() -> None:
    assert mixed_seed(0) == 0xE220A8397B1DCDAF  # splitmix64's first
    seeds = {mixed_seed(*numbers) % 2**32 for numbers in itertools.product(range(8), repeat=4)}
    assert len(seeds) == 8**4
    assert len({mixed_seed(2**63 - 1, -1), mixed_seed(2**63 - 1, 1), mixed_seed(-1, 2**63 - 1)}) == 3


def test_a_resumed_run_admits_the_same_values() -> None:
    def made() -> tuple[nn.ModuleList, ChunkPruner]:
        tables = nn.ModuleList(
            AdaptiveEmbeddingBag(64, 16, chunk_dim=4, budget=0.2, mode="sum", training="fused") for _ in range(2)
        )
        return tables, ChunkPruner(tables, first=2, growth=1.0, interval=2)

    def train(tables: nn.ModuleList, pruner: ChunkPruner, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for table in tables:
                table(torch.randint(0, 8 + 4 * step, (8, 4), generator=generator)).sub(1).square().sum().backward()
            pruner.step()

    straight, resumed, other = made(), made(), made()
    train(*straight, range(12))
    train(*resumed, range(6))
    for part, state in zip(other, resumed, strict=True):
        part.load_state_dict(copy.deepcopy(state.state_dict()))
    train(*other, range(6, 12))
    for name, value in straight[0].state_dict().items():
        assert torch.equal(other[0].state_dict()[name], value), name


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
        ({"hysteresis": 1e39}, ValueError, "hysteresis = 1e+39"),
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


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_swaps": -1}, ValueError, "max_swaps = -1: allowed 0 or more, or None"),
        ({"max_swaps": 1.5}, TypeError, "max_swaps = 1.5 is a float; it must be an int, 0 or more, or None"),
        ({"hysteresis": math.inf}, ValueError, "hysteresis = inf: allowed 0 or more, finite in float32"),
        ({"hysteresis": 1e39}, ValueError, "hysteresis = 1e+39"),
        ({"hysteresis": math.nan}, ValueError, "hysteresis = nan"),
        ({"hysteresis": "x"}, TypeError, "hysteresis = 'x' is a str"),
        ({"capacity": 60.5}, TypeError, "capacity = 60.5 is a float; it must be an int, 0..100, or None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_a_pruning_that_is_refused_leaves_the_table_as_it_was(
    layout: str, options: dict[str, Any], kind: type[BaseException], text: str
) -> None:
    table = trained(layout)
    before = copy.deepcopy(table.state_dict())
    with pytest.raises(kind) as caught:
        table.prune(**{"capacity": 60, **options})
    assert text in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in table.state_dict().items())
    table(torch.arange(50).view(10, 5)).sum().backward()
    table.prune(capacity=60, max_swaps=2**70)
    assert table.budget_chunks == 60
