"""Replicas and shards of a table with a budget, against one process whose table has the same chunks resident."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adaptive import BAGS, DIM, ROWS, STEPS, batch, hold, loss
from harness import Rank
from rows import row, values_in_one_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torchext.nn import AdaptiveEmbeddingBag, ChunkPruner

OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
# After each step: the table, and the resident chunks.
Trace = list[tuple[Tensor, Tensor]]


def traced(table: AdaptiveEmbeddingBag) -> tuple[Tensor, Tensor]:
    return table.weight.clone(), table._resident()[0].clone()


def replica(layout: str) -> AdaptiveEmbeddingBag:
    return AdaptiveEmbeddingBag(
        ROWS, DIM, mode="sum", sparse=True, budget=0.4, chunk_dim=4, layout=layout, init_std=0.1, dtype=torch.float64
    )


def train_replica(rank: Rank, layout: str, name: str) -> Trace:
    table = replica(layout)
    ddp = DistributedDataParallel(table)
    optimizer = OPTIMIZERS[name](ddp.parameters(), lr=0.2)
    pruner = ChunkPruner(ddp, optimizer=optimizer, first=1, growth=1.0, interval=3, max_swap_share=0.3, hysteresis=0.0)
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp(batch(rank.rank, step))).backward()
        optimizer.step()
        pruner.step()
        trace.append(traced(table))
    return trace


def check_replicas(traces: list[Trace], name: str) -> None:
    table = replica("direct")
    optimizer = OPTIMIZERS[name](table.parameters(), lr=0.2)
    held: set[int] = set()
    left = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(table(torch.cat([batch(rank, step) for rank in range(len(traces))]))).backward()
        optimizer.step()
        keys = set(traces[0][step][1].tolist())
        if keys != held:
            left += len(held - keys)
            hold(table, traces[0][step][1], optimizer)
            held = keys
        for trace in traces:
            weight, resident = trace[step]
            assert set(resident.tolist()) == held
            torch.testing.assert_close(weight, table.weight)
    assert len(held) == 30
    assert left > 3


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_equal_one_process_with_the_same_chunks(world: int) -> None:
    ways = [("direct", "adagrad"), ("hash", "adam"), ("sketch", "sgd")]
    cases = {name: (train_replica, layout, name) for layout, name in ways}
    for name, traces in values_in_one_group(cases, world).items():
        with row(name):
            check_replicas(traces, name)


def table_of(mode: str, training: str, optimizer: str, layout: str) -> AdaptiveEmbeddingBag:
    options: dict[str, Any] = {"mode": mode, "training": training, "optimizer": optimizer, "lr": 0.2}
    budget = {"budget": 0.4, "chunk_dim": 4, "layout": layout, "init_std": 0.0}
    return AdaptiveEmbeddingBag(ROWS, DIM, dtype=torch.float64, **options, **budget)


def train_shards(rank: Rank, mode: str, optimizer: str, layout: str) -> Trace:
    table = table_of(mode, "sharded", optimizer, layout)
    pruner = ChunkPruner(table, first=1, growth=1.0, interval=3, max_swap_share=0.3, hysteresis=0.0)
    trace = []
    for step in range(STEPS):
        loss(table(batch(rank.rank, step, 3 + rank.rank))).backward()
        pruner.step()
        trace.append(traced(table))
    return trace


def check_shards(traces: list[Trace], mode: str, optimizer: str) -> None:
    world = len(traces)
    table = table_of(mode, "fused", optimizer, "direct")
    held: set[int] = set()
    left = 0
    for step in range(STEPS):
        parts = [batch(rank, step, 3 + rank) for rank in range(world)]  # in one call, which makes one update
        sizes = torch.cat([torch.full((len(part),), part.shape[1]) for part in parts])
        outputs = table(torch.cat([part.reshape(-1) for part in parts]), sizes.cumsum(0) - sizes)
        torch.stack([loss(output) for output in outputs.split(BAGS)]).mean().backward()
        resident = []
        for rank, trace in enumerate(traces):
            keys = trace[step][1]
            row, chunk = keys // table.chunks, keys % table.chunks
            resident.append((row * world + rank) * table.chunks + chunk)
        keys = torch.cat(resident)
        if set(keys.tolist()) != held:
            left += len(held - set(keys.tolist()))
            hold(table, keys)
            held = set(keys.tolist())
        for rank, trace in enumerate(traces):
            torch.testing.assert_close(trace[step][0], table.weight[rank::world])
    assert len(held) >= 28
    assert left > 3


@pytest.mark.parametrize("world", [2, 3])
def test_shards_equal_one_process_with_the_same_chunks(world: int) -> None:
    ways = {"direct": ("sum", "adagrad"), "hash": ("mean", "adam"), "sketch": ("sum", "sgd")}
    cases = {layout: (train_shards, *way, layout) for layout, way in ways.items()}
    for layout, traces in values_in_one_group(cases, world).items():
        with row(layout):
            check_shards(traces, *ways[layout])


class Wire(TorchDispatchMode):
    """Notes what collectives are given: names and shapes of the tensors that are no whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.add(func._schema.name)
            for tensor in torch.utils._pytree.tree_leaves(args):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self.seen.append(tuple(tensor.shape))
        return func(*args, **(kwargs or {}))


class Around(nn.Module):
    """Shards, and something that DDP trains."""

    def __init__(self, bag: AdaptiveEmbeddingBag) -> None:
        super().__init__()
        self.bag, self.scale = bag, nn.Parameter(torch.ones((), dtype=bag.pool.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids) * self.scale


def train_on_the_wire(rank: Rank, size: int, budget: float) -> tuple[set[str], list[tuple[int, ...]]]:
    bag = AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", training="sharded", budget=budget, chunk_dim=4)
    bag._take(torch.randn(bag.num_embeddings, DIM))
    model = DistributedDataParallel(Around(bag))
    for step in range(2):  # DDP arranges its buckets
        loss(model(batch(rank.rank, step, size))).backward()
    before = bag.weight.clone()
    with Wire() as wire:
        loss(model(batch(rank.rank, 2, size))).backward()
        if budget < 1:
            ChunkPruner(bag).prune()
    assert not torch.equal(bag.weight, before)
    return wire.names, wire.seen


def test_no_gradient_of_shards_is_on_the_wire() -> None:
    """Bags and their gradients are, to and from all ranks, however many ids are in them; of the rest what DDP sends."""
    world = 2
    ways = [(size, budget) for size in (3, 50) for budget in (1.0, 0.4)]
    cases = {f"{size} ids, budget {budget}": (train_on_the_wire, size, budget) for size, budget in ways}
    for name, values in values_in_one_group(cases, world).items():
        for names, seen in values:
            assert names == {"c10d::allgather_", "c10d::alltoall_base_", "c10d::allreduce_"}, name
            assert sorted(seen) == [(1,)] + 4 * [(world * BAGS, DIM)], name
