"""Adaptive embeddings on CUDA are those on the CPU: outputs, gradients, updates, utilities, pruning, errors."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from adaptive_device import Device, same, same_tables
from adaptive_tables import Draw
from torch import Tensor

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner


def made(draw: Draw, **options: Any) -> AdaptiveEmbeddingBag:
    update = {"lr": 0.1, "eps": 1e-8} if options.get("training") == "fused" else {}
    options = {"chunk_dim": draw.chunk_dim, **update, **options}
    if options.get("budget", 1.0) == 1.0 and draw.chunk_dim == draw.dim:
        options["chunk_dim"] = None
    bag = AdaptiveEmbeddingBag(draw.rows, draw.dim, **draw.options, **options)
    bag._take(torch.randn(draw.rows, draw.dim).to(draw.dtype))
    return bag


def step(bag: AdaptiveEmbeddingBag, draw: Draw, weights: Tensor | None, upstream: Tensor, put: Any) -> Tensor:
    ids, offsets = put(draw.ids), None if draw.offsets is None else put(draw.offsets)
    output = bag(ids, offsets, weights)
    output.backward(put(upstream))
    gradient = bag.pool.grad
    if gradient is not None:  # plain SGD, on either kind of gradient
        with torch.no_grad():
            bag.pool -= 0.1 * (gradient.to_dense() if gradient.is_sparse else gradient)
        bag.pool.grad = None
    return output.detach()  # type: ignore[no-any-return]


TRAINING = [
    {"training": "dense"},
    {"training": "sparse"},
    {"training": "fused", "optimizer": "sgd"},
    {"training": "fused", "optimizer": "adagrad"},
    {"training": "fused", "optimizer": "adam"},
]


def _bags(draw: Draw) -> int:
    if draw.offsets is None:
        return len(draw.ids)
    return len(draw.offsets) - (1 if draw.options.get("include_last_offset") else 0)


@pytest.mark.parametrize("training", TRAINING, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("table", [{}, *({"budget": 0.5, "layout": layout} for layout in ("direct", "hash", "sketch"))])
@pytest.mark.parametrize("seed", range(6))
def test_training_equals_the_cpu(device: Device, seed: int, table: dict[str, Any], training: dict[str, str]) -> None:
    draw = Draw(1000 * len(table) + 17 * seed + len(training))
    if draw.mode == "max" and training["training"] == "sparse":
        draw.mode = draw.options["mode"] = "sum"
    ours_on_cpu = made(draw, **table, **training)
    ours = device.put(ours_on_cpu)
    for number in range(3):
        weights = None if draw.weights is None else draw.weights.clone().requires_grad_()
        upstream = torch.randn(_bags(draw), draw.dim).to(draw.dtype)
        expected = step(ours_on_cpu, draw, weights, upstream, lambda tensor: tensor)
        with device.active():
            own_weights = device.put(None if draw.weights is None else draw.weights.clone().requires_grad_())
            if own_weights is not None:
                own_weights = own_weights.detach().requires_grad_()
            output = step(ours, draw, own_weights, upstream, device.put)
        same(output, expected)
        if weights is not None and weights.grad is not None:
            same(own_weights.grad, weights.grad)
        same_tables(ours, ours_on_cpu)
        if ours.layout != "identity":
            # Equal utilities, to the bit: roundings must not decide what is pruned.
            ours.utility.copy_(ours_on_cpu.utility)
            ours.sketch.copy_(ours_on_cpu.sketch)
            capacity = min(draw.rows * ours.chunks, ours.budget_chunks + number)
            done = ours_on_cpu.prune(hysteresis=0.1, capacity=capacity)
            with device.active():
                assert ours.prune(hysteresis=0.1, capacity=capacity) == done
            same_tables(ours, ours_on_cpu)
            with device.active():
                same(ours.weight, ours_on_cpu.weight)
                assert ours.stats() == ours_on_cpu.stats()
    with torch.no_grad():  # evaluation takes another path
        expected = ours_on_cpu(draw.ids, draw.offsets, draw.weights)
        with device.active():
            ids, offsets, weights = map(device.put, (draw.ids, draw.offsets, draw.weights))
            same(ours(ids, offsets, weights), expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("chunk_dim", [4, 16, 64, 136])
def test_popular_rows_are_summed_in_pieces(device: Device, chunk_dim: int, optimizer: str) -> None:
    """Runs far longer than a piece, and the same bits from run to run."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"mode": "mean", "training": "fused", "optimizer": optimizer, "chunk_dim": chunk_dim}
    on_cpu = AdaptiveEmbeddingBag(40, 136 if chunk_dim == 136 else 64, budget=0.7, layout="direct", **options)
    on_cpu._take(torch.randn(40, on_cpu.embedding_dim))
    twins = [device.put(on_cpu) for _ in range(2)]
    ids, offsets = (torch.rand(3000) ** 4 * 40).long(), torch.arange(0, 3000, 7, dtype=torch.int32)
    upstream = torch.randn(len(offsets), on_cpu.embedding_dim)
    for _ in range(2):
        on_cpu(ids, offsets).backward(upstream)
        for twin in twins:
            with device.active():
                twin(device.put(ids), device.put(offsets)).backward(device.put(upstream))
        same_tables(twins[0], on_cpu)
        for name, value in twins[0].state_dict().items():
            assert torch.equal(twins[1].state_dict()[name], value), name


@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
def test_single_vectors_equal_the_cpu(device: Device, training: str) -> None:
    torch.manual_seed(2)
    on_cpu = AdaptiveEmbedding(30, 16, padding_idx=3, training=training, budget=0.5, chunk_dim=4, layout="hash")
    on_cpu._take(torch.randn(30, 16))
    ours = device.put(on_cpu)
    ids = torch.randint(0, 30, (5, 7), dtype=torch.int32)
    ids[0, 0] = 3
    expected = on_cpu(ids)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    with device.active():
        output = ours(device.put(ids))
        output.backward(device.put(upstream))
    same(output, expected)
    same_tables(ours, on_cpu)
    if training != "fused":
        gradients = [table.pool.grad.to_dense() for table in (ours, on_cpu)]
        same(*gradients)


def test_the_clock_is_set_back_with_the_utilities(device: Device) -> None:
    for layout in ("direct", "hash", "sketch"):
        on_cpu = AdaptiveEmbeddingBag(
            9, 8, budget=0.5, chunk_dim=4, layout=layout, training="fused", gamma=0.5, mode="sum"
        )
        on_cpu._take(torch.randn(9, 8))
        ours = device.put(on_cpu)
        ids = torch.tensor([[0, 1, 1, 8]])
        for number in range(150):  # 2^150 is past both limits
            on_cpu(ids).square().sum().backward()
            with device.active():
                ours(device.put(ids)).square().sum().backward()
            assert torch.equal(ours.clock, on_cpu.clock), number
        assert float(on_cpu.clock[1]) < 2.0**61
        same_tables(ours, on_cpu)


@pytest.mark.parametrize("training", ["dense", "fused"])
def test_bad_batches_get_the_errors_of_the_cpu(device: Device, training: str) -> None:
    torch.manual_seed(3)
    on_cpu = AdaptiveEmbeddingBag(10, 8, mode="sum", training=training, max_norm=0.1)
    ours = device.put(on_cpu)
    before = copy.deepcopy(ours.state_dict())
    ids, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2])
    for batch in (
        (torch.tensor([1, 10, 3]), torch.tensor([0])),
        (torch.tensor([1, 2, -1]), torch.tensor([0])),
        (torch.tensor([1, 2**32 + 1]), torch.tensor([0])),
        (ids, torch.tensor([1, 2])),
        (ids, torch.tensor([0, 5])),
        (ids, torch.tensor([0, 3, 2])),
        (ids, torch.tensor([0, -1])),
        (ids, offsets, torch.ones(4).double()),
        (ids.view(2, 2), offsets),
    ):
        on_cpu.max_norm = ours.max_norm = 0.1 if training == "dense" and batch[0].max() > 9 else None
        with pytest.raises((ValueError, IndexError, TypeError)) as expected:
            on_cpu(*batch)
        with device.active(), pytest.raises((ValueError, IndexError, TypeError)) as caught:
            ours(*map(device.put, batch))
        assert caught.type is expected.type
        assert str(caught.value) == str(expected.value)
        assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_a_shared_budget_is_shared_as_on_the_cpu(device: Device) -> None:
    torch.manual_seed(4)
    options: dict[str, Any] = {"chunk_dim": 4, "layout": "hash", "training": "fused", "mode": "sum", "budget": 50}
    tables = [AdaptiveEmbeddingBag(200, 16, **options), AdaptiveEmbeddingBag(200, 8, **options)]
    twins = [device.put(table) for table in tables]
    pruners = [ChunkPruner(both, first=1, interval=4, shared_budget=100) for both in (tables, twins)]
    for _ in range(12):
        for table, twin, rows in zip(tables, twins, (30, 5), strict=True):
            ids = torch.randint(0, rows, (64, 4))
            table(ids).sub(1).square().sum().backward()
            with device.active():
                twin(device.put(ids)).sub(1).square().sum().backward()
            twin.utility.copy_(table.utility)
        done = pruners[0].step()
        with device.active():
            assert pruners[1].step() == done
        for table, twin in zip(tables, twins, strict=True):
            same_tables(twin, table)


@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
def test_a_sketch_is_that_of_the_cpu_to_the_bit(device: Device, training: str) -> None:
    """Where nothing is rounded: gradients are whole numbers. A batch has more absent chunks than a sketch has cells."""
    torch.manual_seed(6)
    options: dict[str, Any] = {"layout": "sketch", "training": training, "mode": "sum"}
    if training == "fused":
        options |= {"optimizer": "sgd", "lr": 1.0}
    on_cpu = AdaptiveEmbeddingBag(500, 16, budget=0.02, chunk_dim=4, gamma=0.5, **options)
    ours = device.put(on_cpu)
    keys: set[int] = set()
    for number in range(30):
        ids = torch.randint(0, 500, (100, 4))
        upstream = torch.randint(-2, 3, (100, 16)).float()
        for bag, put in ((on_cpu, lambda tensor: tensor), (ours, device.put)):
            with device.active() if bag is ours else contextlib.nullcontext():
                bag(put(ids)).backward(put(upstream))
                bag.pool.grad = None
                if number % 10 == 9:
                    bag.prune(hysteresis=0.1)
        for name in ("sketch", "utility", "index", "seen", "clock"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(on_cpu, name)), (number, name)
        keys |= set(on_cpu.sketch.tolist())
    assert len(keys) > 3 * len(on_cpu.sketch)
    assert on_cpu.stats()["resident_chunks"] == on_cpu.budget_chunks
