"""AdaptiveEmbeddingBag and AdaptiveEmbedding with everything resident are nn.EmbeddingBag and nn.Embedding."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from adaptive_tables import Draw, close
from torch import nn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag


@pytest.mark.parametrize("seed", range(120))
def test_dense_gradient_equals_embedding_bag(seed: int) -> None:
    draw = Draw(seed)
    ours, theirs = draw.pair()
    expected, expected_weights, upstream = draw.step(theirs, None, None)
    output, weights, _ = draw.step(ours, None, upstream)
    close(output, expected)
    close(ours.weight, theirs.weight.detach())  # max_norm writes
    assert ours.pool.grad is not None
    assert theirs.weight.grad is not None
    close(ours.pool.grad.view(draw.rows, draw.dim), theirs.weight.grad)
    if weights is not None:
        close(weights, expected_weights)
    # Evaluation takes another path.
    with torch.no_grad():
        close(draw.call(ours, draw.ids, draw.weights, draw.offsets), expected)


@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_a_frozen_table_stays_what_it_is(training: str, budget: float) -> None:
    torch.manual_seed(7)
    options: dict[str, Any] = {"mode": "sum", "training": training, "budget": budget, "chunk_dim": 4}
    bag = AdaptiveEmbeddingBag.from_pretrained(torch.randn(9, 8), **options)
    ids, weights = torch.randint(0, 9, (4, 3)), torch.randn(4, 3, requires_grad=True)

    def train() -> bool:
        """Whether that changed anything of the table."""
        before = copy.deepcopy(bag.state_dict())
        bag(ids, None, weights).sum().backward()
        gathered, bag.pool.grad = bag.pool.grad, None
        same = all(torch.equal(value, before[name]) for name, value in bag.state_dict().items())
        return gathered is not None or not same

    assert not train()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, bag.weight.sum(1)[ids])
    assert not bag(ids).requires_grad
    for holder in (bag, nn.Sequential(bag)):  # a model asks its parameters, not its modules
        assert holder.requires_grad_() is holder
        assert train()
        holder.requires_grad_(False)
        assert not train()


@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (2, 0, 3)])
def test_embedding_equals_embedding(shape: tuple[int, ...], padding_idx: int | None, training: str) -> None:
    torch.manual_seed(1)
    theirs = nn.Embedding(20, 8, padding_idx=padding_idx)
    update: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5} if training == "fused" else {}
    ours = AdaptiveEmbedding(20, 8, padding_idx=padding_idx, training=training, chunk_dim=4, **update)
    ours.load_state_dict(theirs.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    ids = torch.randint(0, 20, shape)
    expected, output = theirs(ids), ours(ids)
    assert torch.equal(output, expected)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    output.backward(upstream)
    optimizer.step()
    if training != "fused":
        torch.optim.SGD(ours.parameters(), lr=0.5).step()
    close(ours.weight, theirs.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("training", ["dense", "fused"])
def test_bags_without_room_for_ids_take_part_in_training(training: str, mode: str) -> None:
    bag = AdaptiveEmbeddingBag(5, 4, mode=mode, training=training, include_last_offset=True)
    before = bag.weight.clone()
    for bags in (0, 3):
        output = bag(torch.zeros(bags, 0, dtype=torch.int64))
        assert torch.equal(output, torch.zeros(bags, 4))
        output.sum().backward()
    assert torch.equal(bag.weight, before)
    if training == "dense":
        assert bag.pool.grad is not None
        assert not bag.pool.grad.any()


def test_sparse_is_short_for_sparse_training_in_every_mode() -> None:
    for mode in ("sum", "mean", "max"):
        gradients = []
        for options in ({"sparse": True}, {"training": "sparse"}):
            torch.manual_seed(3)
            bag = AdaptiveEmbeddingBag(9, 8, mode=mode, **options)
            bag(torch.tensor([[1, 3, 3], [3, 8, 0]])).square().sum().backward()
            assert bag.pool.grad is not None and bag.pool.grad.is_sparse
            gradients.append(bag.pool.grad.to_dense())
        assert gradients[0].any()
        assert torch.equal(gradients[0], gradients[1])


def test_padding_row_starts_at_zero() -> None:
    assert not AdaptiveEmbedding(5, 4, padding_idx=2).weight[2].any()
    assert not AdaptiveEmbeddingBag(5, 4, padding_idx=-1).weight[4].any()
    assert AdaptiveEmbeddingBag(5, 4).weight.all()


@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("chunk_dim", [8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("budget", [1.0, 0.4])
def test_widths_with_loops_of_their_own(chunk_dim: int, rows: int, budget: float) -> None:
    """More positions than are looked up ahead, repeated ids and single ones, chunks absent and present."""
    torch.manual_seed(6)
    dim = 2 * chunk_dim
    weight = torch.randn(rows, dim)
    layout = "auto" if budget == 1 else "direct"
    bag = AdaptiveEmbeddingBag(
        rows, dim, mode="sum", budget=budget, chunk_dim=chunk_dim, layout=layout, training="fused", lr=0.1, eps=1e-8
    )
    bag._take(weight)
    weight = bag.weight.clone()
    present = weight.view(-1, chunk_dim).abs().sum(1) > 0
    ids, offsets = torch.randint(0, rows, (300,)), torch.arange(0, 300, 3)
    upstream = torch.randn(100, dim)
    output = bag(ids, offsets)
    close(output, torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum"))
    output.backward(upstream)
    gradient = torch.zeros(rows, dim).index_add_(0, ids, upstream.repeat_interleave(3, 0)).view(-1, chunk_dim)
    change = 0.1 * gradient / (gradient.square().mean(1, keepdim=True).sqrt() + 1e-8)
    close(bag.weight, weight - (change * present.unsqueeze(1)).view(rows, dim))
    if budget < 1:
        counts = torch.bincount(ids, minlength=rows).repeat_interleave(2)
        close(bag.utility, counts * gradient.norm(dim=1) / 0.99)


def test_schedulers_reach_the_fused_update() -> None:
    bag = AdaptiveEmbeddingBag(4, 4, mode="sum", training="fused", optimizer="sgd", lr=1.0)
    bag._take(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0}, bag.param_group()], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    for _ in range(3):
        bag(torch.tensor([[1]])).sum().backward()
        optimizer.step()
        scheduler.step()
        seen.append(float(bag.weight[1, 0]))
    assert seen == [-1.0, -1.5, -1.75]


def test_learning_rates_that_are_put_into_the_group_are_taken_over() -> None:
    bag = AdaptiveEmbeddingBag(4, 4, mode="sum", training="fused", optimizer="sgd", lr=1.0)
    bag._take(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([bag.param_group()], lr=1.0)

    def train(bag: AdaptiveEmbeddingBag, optimizer: torch.optim.Optimizer) -> float:
        before = bag.weight[1, 0].item()
        bag(torch.tensor([[1]])).sum().backward()
        optimizer.step()
        return before - bag.weight[1, 0].item()

    saved = copy.deepcopy(optimizer.state_dict())
    bag.lr.fill_(0.25)
    optimizer.load_state_dict(saved)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(bag, optimizer)
    assert bag.lr == 1.0
    scheduler.step()
    assert train(bag, optimizer) == 0.5  # the loaded group is the table's again
    for pair in ((bag, optimizer), copy.deepcopy((bag, optimizer))):
        pair[1].param_groups[0]["lr"] = 0.125
        assert train(*pair) == 0.5
        assert train(*pair) == 0.125


def test_a_learning_rate_follows_no_optimizer_that_was_not_given_the_group() -> None:
    bag = AdaptiveEmbeddingBag(4, 4, mode="sum", training="fused", optimizer="sgd", lr=0.5)
    for table in (bag, copy.deepcopy(bag), pickle.loads(pickle.dumps(bag))):
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        before = table.weight[1, 0].item()
        for _ in range(2):
            table(torch.tensor([[1]])).sum().backward()
            optimizer.step()
        assert table.lr == 0.5
        assert table.weight[1, 0].item() == pytest.approx(before - 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("value", [0.25, 2, torch.tensor(0.25), torch.tensor([2])], ids=str)
def test_learning_rates_that_are_assigned_are_written_into_the_tensor(value: Any, compiled: bool) -> None:
    bag = AdaptiveEmbeddingBag(4, 4, mode="sum", training="fused", optimizer="sgd", lr=1.0)
    run = torch.compile(bag, backend="aot_eager", fullgraph=True) if compiled else bag
    run(torch.tensor([[2]])).sum().backward()
    group, rate = bag.param_group(), bag.lr
    for each in (bag, copy.deepcopy(bag)):
        each.lr = value
    assert bag.lr is rate is group["lr"]
    assert (bag.lr.dtype, bag.lr.shape, bag.lr.item()) == (torch.float64, (), float(value))
    before = bag.weight[1, 0].item()
    run(torch.tensor([[1]])).sum().backward()
    assert bag.weight[1, 0].item() == pytest.approx(before - float(value))
    other = AdaptiveEmbeddingBag(4, 4, mode="sum", training="fused", optimizer="sgd")
    other.load_state_dict(bag.state_dict())
    assert other.lr == float(value) == bag.double().lr


def test_copies_and_pickles_are_tables_of_their_own() -> None:
    bag = AdaptiveEmbeddingBag(20, 8, budget=0.5, chunk_dim=4, training="fused")
    bag._take(torch.randn(20, 8))
    twin = copy.deepcopy(bag)
    file = io.BytesIO()
    torch.save(bag, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    ids = torch.randint(0, 20, (6, 3))
    bag(ids).sum().backward()
    for other in (twin, loaded):
        assert not torch.equal(other.weight, bag.weight)
        other(ids).sum().backward()
        assert torch.equal(other.weight, bag.weight)


def test_half_and_double_convert() -> None:
    bag = AdaptiveEmbeddingBag(20, 8, training="fused", mode="sum")
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        bag.to(dtype)
        output = bag(torch.randint(0, 20, (6, 3)))
        assert output.dtype == dtype
        output.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradients_beside_a_fused_table_are_clipped_by_any_norm(norm_type: float, compiled: bool) -> None:
    torch.manual_seed(0)
    made = AdaptiveEmbeddingBag(6, 8, mode="sum", training="fused", optimizer="sgd")
    frozen = AdaptiveEmbeddingBag.from_pretrained(torch.randn(6, 8), mode="sum", training="fused", optimizer="sgd")
    thawed = copy.deepcopy(frozen).requires_grad_()
    for table in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), thawed, made.double().float()):
        model = nn.Sequential(table, nn.Linear(8, 1))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        before = table.weight.clone()
        for foreach in (None, False, True):
            model[1].zero_grad()  # the table's parameters alone have nothing to be cleared
            run(torch.tensor([[0, 1], [2, 2]])).sum().backward()
            assert [parameter.grad for parameter in table.parameters()] == [None, None]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
            assert norm > 0.1
        assert not torch.equal(table.weight, before)
