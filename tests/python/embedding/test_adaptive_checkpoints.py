"""What a table takes over: its own checkpoints, those of other sizes, and whole embeddings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adaptive_tables import trained
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag


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


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_distributed_checkpoints_find_everything(optimizer: str) -> None:
    made = [nn.Sequential(AdaptiveEmbedding(10, 8, training="fused", optimizer=optimizer)) for _ in range(2)]
    made[0](torch.arange(10)).sum().backward()
    state = get_model_state_dict(made[0])
    assert set(state) == set(made[0].state_dict())
    set_model_state_dict(made[1], state)
    for name, value in made[0].state_dict().items():
        assert torch.equal(made[1].state_dict()[name], value), name


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_a_checkpoint_of_the_first_version_goes_on(layout: str) -> None:
    bag = trained(layout)
    state = bag.state_dict()
    for position in range(2):
        state[f"state.{position}"] = state.pop(f"state{position}")
    if layout != "direct":  # one was code 160
        state["utility"] = torch.where(state["utility"] > 0, state["utility"] + 64, 0)
    state._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    twin = AdaptiveEmbeddingBag(50, 8, budget=0.3, chunk_dim=4, layout=layout, training="fused", optimizer="adam")
    twin.load_state_dict(state)
    for module in (bag, twin):
        torch.manual_seed(5)
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


def test_a_checkpoint_with_another_size_is_trained_on() -> None:
    small, large = (AdaptiveEmbedding(50, 16, budget=budget, chunk_dim=4, layout="hash") for budget in (20, 30))
    held = small(torch.arange(50)).sum()
    small.load_state_dict(large.state_dict())
    small(torch.arange(50)).sum().backward()
    assert held.requires_grad
    assert small.pool.grad is not None
    assert small.pool.grad.shape == (30, 4)


@pytest.mark.parametrize("layout", ["direct", "hash"])
def test_an_optimizers_state_of_another_budget_is_named_before_it_steps(layout: str) -> None:
    def made(budget: int) -> tuple[AdaptiveEmbedding, torch.optim.Optimizer]:
        table = AdaptiveEmbedding.from_pretrained(
            torch.randn(50, 16), freeze=False, budget=budget, chunk_dim=4, layout=layout
        )
        optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
        step(table, optimizer)
        return table, optimizer

    def step(table: AdaptiveEmbedding, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        table(torch.arange(50)).sum().backward()
        optimizer.step()

    (small, saved), (large, optimizer) = made(20), made(30)
    large.load_state_dict(small.state_dict())
    assert large.budget_chunks == 20
    before = large.pool.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"state 'exp_avg' is of 30 slots, the table has a pool of 20 since.*new"):
            step(large, optimizer)
    assert torch.equal(large.pool, before)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for table, steps in ((small, saved), (large, optimizer)):
        step(table, steps)
    assert torch.equal(large.weight, small.weight)
    other, _ = made(30)
    other.load_state_dict(small.state_dict())
    step(other, torch.optim.Adam(other.parameters(), lr=0.1))


@pytest.mark.parametrize("late", [False, True], ids=["before the next step", "steps later"])
@pytest.mark.parametrize("resized_by", ["a checkpoint", "pruning"])
def test_an_optimizers_state_of_before_the_pool_was_resized_is_named_before_it_steps(
    resized_by: str, late: bool
) -> None:
    torch.manual_seed(4)
    options: dict[str, Any] = {"freeze": False, "chunk_dim": 4, "layout": "hash"}
    table, small = (
        AdaptiveEmbedding.from_pretrained(torch.randn(50, 16), budget=budget, **options) for budget in (30, 20)
    )
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        table(torch.arange(50)).sum().backward()
        optimizer.step()

    step()
    of_table, of_optimizer = copy.deepcopy(table.state_dict()), copy.deepcopy(optimizer.state_dict())
    if resized_by == "pruning":
        table.prune(optimizer=optimizer, capacity=20)
    else:
        table.load_state_dict(small.state_dict())
        optimizer.state.clear()
    if late:
        step()
    optimizer.load_state_dict(of_optimizer)
    before = table.pool.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"state 'exp_avg' is of 30 slots, the table has a pool of 20 .*new"):
            step()
    assert torch.equal(table.pool, before)
    table.load_state_dict(of_table)  # after the optimizer's part
    step()
    optimizer.load_state_dict(of_optimizer)
    step()
    table.prune(capacity=20)  # and the optimizer's state stays where it was
    with pytest.raises(ValueError, match=r"state 'exp_avg' is of 30 slots, the table has a pool of 20 .*pruned"):
        step()


def test_values_come_in_by_load_state_dict_and_not_through_the_weight_of_a_small_budget() -> None:
    table = AdaptiveEmbedding(20, 8, budget=0.5, chunk_dim=4)
    with pytest.raises(RuntimeError, match="weight of this table is set"):
        torch.nn.init.constant_(table.weight, 3.0)
    table.load_state_dict({"weight": torch.full((20, 8), 3.0)})
    assert table.weight.sum() == 3.0 * 4 * table.budget_chunks
    whole = AdaptiveEmbedding(20, 8)
    torch.nn.init.constant_(whole.weight, 3.0)
    assert (whole(torch.arange(20)) == 3.0).all()


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


def test_a_sketch_takes_a_checkpoint_with_another_size() -> None:
    torch.manual_seed(6)
    small, large = (AdaptiveEmbedding(1000, 16, budget=budget, chunk_dim=4, layout="sketch") for budget in (300, 600))
    for table, other in ((large, small), (small, large)):
        table(torch.randint(0, 1000, (500,))).square().sum().backward()
        table.prune()
        other.load_state_dict(table.state_dict())
        for each in (table, other):
            torch.manual_seed(7)
            for _ in range(2):
                each(torch.randint(0, 1000, (500,))).sub(1).square().sum().backward()
                each.prune()
        for name, value in table.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    wrong = {**large.state_dict(), "sketch": large.sketch[:5]}
    with pytest.raises(RuntimeError, match=r"sketch: saved with shape \(5,\), allowed 64\.\.2000 as its first size"):
        small.load_state_dict(wrong)


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
        ("state1", state["state1"][1:], r"\(29, 4\), allowed 30\.\.30"),
        ("pool", torch.zeros(101, 4), r"\(101, 4\), allowed 0\.\.100"),
        ("pool", torch.zeros(30, 5), r"\(30, 5\), allowed 0\.\.100 as its first size, then \(4,\)"),
        ("pool", torch.zeros(()), r"\(\), allowed"),
    ):
        refused({**state, name: wrong}, f"{name}: saved with shape {text}")
    refused({**other.state_dict(), "state0": state["state0"]}, r"state0: saved with shape \(30, 4\), allowed 40\.\.40")
    refused({**state, "index": state["index"].int()}, "index: saved as torch.int32, the table has torch.int64")
    refused({name: value for name, value in state.items() if name != "clock"}, "Missing key.*clock")
    refused({**state, "surplus": state["clock"]}, "Unexpected key.*surplus")
    refused({"weight": torch.zeros(49, 8)}, r"embeddings have shape \(49, 8\); the table is \(50, 8\)")
    newer = bag.state_dict()
    newer._metadata[""]["version"] = 4  # type: ignore[attr-defined]
    refused(newer, r"saved as version 4, this is version 3, which takes 1\.\.3")
    for cell, slot in ((state["index"] != -1).nonzero()[0], 30), ((state["index"] == -1).nonzero()[0], 0):
        index = state["index"].clone()
        index[cell] = 100 << 32 | slot
        refused({**state, "index": index}, r"index: holds (chunk 100, allowed 0\.\.99|31 chunks, allowed 30)")
    # Another number of slots is another share of a common budget: taken over.
    bag.load_state_dict(other.state_dict())
    assert torch.equal(bag.weight, other.weight)
    assert bag.budget_chunks == other.budget_chunks


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("budget", [1.0, 60])
def test_a_table_that_an_optimizer_trained_goes_on_fused_where_not_everything_is_asked_for(
    budget: float, optimizer: str
) -> None:
    torch.manual_seed(3)
    options: dict[str, Any] = {"chunk_dim": 4, "mode": "sum"} | ({} if budget == 1.0 else {"layout": "hash"})
    dense = AdaptiveEmbeddingBag(50, 8, budget=budget, **options)
    fused = AdaptiveEmbeddingBag(
        50, 8, budget=1.0 if budget == 1.0 else 30, training="fused", optimizer=optimizer, **options
    )
    for bag in (dense, fused):
        for _ in range(2):
            bag(torch.randint(0, 50, (10, 4))).square().sum().backward()
            bag.prune(optimizer=None if bag is fused else torch.optim.SGD(bag.parameters()))
    if budget == 1.0:  # a weight, as of nn.EmbeddingBag
        fused.load_state_dict(dense.state_dict())
    else:
        with pytest.raises(RuntimeError, match=r"Missing key.*trigger"):
            fused.load_state_dict(dense.state_dict())
        found = nn.Sequential(fused).load_state_dict(nn.Sequential(dense).state_dict(), strict=False)
        assert set(found.missing_keys) == {"0.trigger", *(f"0.{name}" for name in fused.state_names)}
        assert not found.unexpected_keys
    assert torch.equal(fused.weight, dense.weight)
    assert not any(state.any() for state in fused.state)
    fresh = AdaptiveEmbeddingBag(50, 8, budget=budget, training="fused", optimizer=optimizer, **options)
    fresh.load_state_dict(dense.state_dict(), strict=False)
    for bag in (fused, fresh):
        bag(torch.arange(50).view(10, 5)).square().sum().backward()
    assert torch.equal(fused.weight, fresh.weight)


@pytest.mark.parametrize("lacks", ["index", "pool", "clock"])
def test_keys_that_were_not_loaded_are_all_missing(lacks: str) -> None:
    bag, other = trained(), trained()
    other(torch.arange(50).view(10, 5)).sum().backward()
    before = copy.deepcopy(bag.state_dict())
    state = {name: value for name, value in other.state_dict().items() if name not in (lacks, "state0")}
    found = bag.load_state_dict(state, strict=False)
    assert set(found.missing_keys) == set(before) - {"extent"}
    assert set(found.missing_keys[:2]) == {lacks, "state0"}
    assert all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())


@pytest.mark.parametrize("old", [False, True], ids=["", "version 2"])
@pytest.mark.parametrize(("rows", "dim"), [(1000, 32), (1000, 128), (993, 64), (2000, 32), (500, 128)])
@pytest.mark.parametrize("layout", ["direct", "hash", "sketch", "whole"])
def test_a_checkpoint_of_a_table_of_another_extent_is_refused(layout: str, rows: int, dim: int, old: bool) -> None:
    torch.manual_seed(3)
    budget: dict[str, Any] = {"budget": 1.0} if layout == "whole" else {"budget": 100, "layout": layout}
    saved, other = (
        AdaptiveEmbeddingBag(*size, chunk_dim=16, training="fused", mode="sum", **budget)
        for size in ((1000, 64), (rows, dim))
    )
    for _ in range(2):
        saved(torch.arange(900, 1000).view(-1, 1)).sum().backward()
        saved.prune()
    state, before = saved.state_dict(), copy.deepcopy(other.state_dict())
    text = rf"extent: saved of a table of 1000 rows with 4 chunks each, this one has {rows} with {dim // 16}"
    if old:
        del state["extent"]
        state._metadata[""]["version"] = 2  # type: ignore[attr-defined]
        if (layout == "whole" and rows * dim == 64000) or (layout == "sketch" and (rows, dim) == (1000, 128)):
            return  # nothing in it tells
        text = r"saved with shape|index: holds chunk 3999, allowed 0\.\."
    with pytest.raises(RuntimeError, match=text):
        other.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_a_checkpoint_of_the_second_version_goes_on(layout: str) -> None:
    bag = trained(layout)
    state = bag.state_dict()
    del state["extent"]
    state._metadata[""]["version"] = 2  # type: ignore[attr-defined]
    twin = AdaptiveEmbeddingBag(50, 8, budget=0.3, chunk_dim=4, layout=layout, training="fused", optimizer="adam")
    twin.load_state_dict(state)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in bag.state_dict().items())


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


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_an_average_across_a_pruning_is_refused_and_one_without_follows(layout: str, max_norm: float | None) -> None:
    torch.manual_seed(0)
    table = AdaptiveEmbedding(50, 16, budget=0.25, chunk_dim=4, layout=layout, max_norm=max_norm)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    ids = torch.arange(50)

    def train() -> None:
        optimizer.zero_grad()
        table((torch.rand(64) ** 2 * 50).long()).sub(1).square().sum().backward()
        optimizer.step()

    train()
    table.prune(optimizer=optimizer)
    average = AveragedModel(table, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    snapshot, twin = copy.deepcopy(table), copy.deepcopy(table)
    kept = snapshot(ids)
    for _ in range(5):
        train()
        average.update_parameters(table)
        average(ids)
    for _ in range(40):
        average.update_parameters(table)
    torch.testing.assert_close(average(ids), table(ids))
    table.prune(optimizer=optimizer)
    average.update_parameters(table)
    with pytest.raises(RuntimeError, match=r"written from outside.*pruned since.*anew after each pruning"):
        average(ids)
    average.module.load_state_dict(table.state_dict())  # a table of its own
    assert torch.equal(average(ids), table(ids))
    again = AveragedModel(table)
    again.update_parameters(table)
    assert torch.equal(again(ids), table(ids))
    # Copies that nobody averages into are tables as any other, whether they train or not.
    torch.testing.assert_close(snapshot(ids), kept)
    torch.testing.assert_close(snapshot.double()(ids), kept.double())
    twin(ids).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert (twin(ids) - kept).abs().max() > 0.01


def test_hooks_before_a_load_are_called() -> None:
    table = AdaptiveEmbeddingBag(6, 8, mode="sum")
    state = {f"old_{name}": value for name, value in table.state_dict().items()}

    def rename(_: nn.Module, given: dict[str, Any], *__: Any) -> None:
        for name in list(given):
            given[name.removeprefix("old_")] = given.pop(name)

    other = AdaptiveEmbeddingBag(6, 8, mode="sum")
    other.register_load_state_dict_pre_hook(rename)
    other.load_state_dict(state)
    assert torch.equal(other.weight, table.weight)
