"""What adaptive tables do in a process group and in DDP, where it needs no second process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchext
from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner

ROWS, DIM, BAGS = 37, 8, 6


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process, whose collectives are Gloo's."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def as_rank() -> Iterator[Any]:
    """Makes this process a rank of several; its collectives exchange nothing."""

    def become(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield become
    dist.destroy_process_group()


def table(**options: Any) -> AdaptiveEmbeddingBag:
    given = {"budget": 0.4, "chunk_dim": 4, "layout": "direct", "mode": "sum", "init_std": 0.1}
    return AdaptiveEmbeddingBag(ROWS, DIM, **given | options)


def batch(step: int = 0, size: int = 4) -> Tensor:
    return (torch.rand(BAGS, size, generator=torch.Generator().manual_seed(step)) ** 2 * ROWS).long()


@pytest.mark.parametrize("compiled", ["", "inside", "outside"])
def test_a_fused_table_in_ddp_is_refused_with_the_way_out(alone: None, compiled: str) -> None:
    model = nn.Sequential(table(training="fused"), nn.Linear(DIM, 1))
    if compiled == "inside":
        model.compile(backend="eager")
    ddp = DistributedDataParallel(model)
    if compiled == "outside":
        ddp.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"replicas would differ.*training='sparse'.*training='sharded'"):
        ddp(batch())


def test_the_first_pass_in_ddp_is_no_full_graph_and_says_so(alone: None) -> None:
    module = table()
    module.compile(backend="eager", fullgraph=True)
    ddp = DistributedDataParallel(module)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run one forward pass in DDP before compiling"):
        ddp(batch())
    module._compiled_call_impl = None
    ddp(batch())
    module.compile(backend="eager", fullgraph=True)
    assert ddp(batch()).requires_grad


class Two(nn.Module):
    """Tables that could share a budget."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = table(), table()

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids)


def test_a_shared_budget_in_ddp_is_refused_with_the_way_out(alone: None) -> None:
    model = Two()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Leave shared_budget out") as before:
        ChunkPruner(ddp, optimizer=optimizer, shared_budget=20)
    pruner = ChunkPruner(model, optimizer=optimizer, shared_budget=20)  # cannot know yet
    ddp(batch()).sum().backward()
    with pytest.raises(ValueError, match="Leave shared_budget out") as pruning:
        pruner.prune()
    assert str(pruning.value) == str(before.value)
    with pytest.raises(RuntimeError, match="pool: another number of slots inside DDP; load before"):
        model.first.load_state_dict(table(budget=3).state_dict())


def test_the_only_replica_is_pruned_by_itself(alone: None) -> None:
    model = table(sparse=True)
    DistributedDataParallel(model)(batch()).sub(1).square().mean().backward()
    assert model.prune(optimizer=torch.optim.SGD(model.parameters(), lr=0.5))["admitted"] > 5


def test_workers_that_may_be_lost_are_refused() -> None:
    dist.init_process_group("prague", store=HashStore(), rank=0, world_size=1)
    model = AdaptiveEmbedding(64, 16, budget=0.25, chunk_dim=4, layout="direct")
    ddp = DistributedDataParallel(nn.Sequential(model, nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    pruner = ChunkPruner(ddp, optimizer=optimizer)
    torchext.attach(ddp, optimizer, on_peer_failure="continue")
    ddp(torch.arange(64)).square().mean().backward()
    says = r"on_peer_failure = 'continue' of torchext.attach.*allowed is 'raise'"
    with pytest.raises(ValueError, match=says):
        pruner.prune()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mean_of_many_ids_of_shards_is_that_many(alone: None, dtype: torch.dtype) -> None:
    bag = AdaptiveEmbeddingBag(4, 4, mode="mean", training="sharded", padding_idx=0, dtype=dtype)
    bag.load_state_dict({"weight": torch.ones(4, 4)})
    ids = torch.cat([torch.full((5000,), 1), torch.full((300,), 0)])
    mean = bag(ids, torch.tensor([0, 0])).detach()
    assert mean.dtype == dtype
    assert mean.tolist() == [[0.0] * 4, [1.0] * 4]


def test_frozen_shards_are_not_trained(alone: None) -> None:
    bag = AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", training="sharded")
    before = bag.weight.clone()
    for trains in (False, True):
        bag.requires_grad_(trains)
        bag(batch(), None, torch.ones(BAGS, 4, requires_grad=True)).sum().backward()
        assert torch.equal(bag.weight, before) == (not trains)


def test_shards_make_everything_on_the_tables_device(alone: None) -> None:
    """They train while tensors that are made without a device land on one that cannot take part."""
    bag = AdaptiveEmbeddingBag(ROWS, DIM, mode="mean", training="sharded", lr=0.3, padding_idx=1)
    trained = copy.deepcopy(bag)
    for module, device in ((bag, "cpu"), (trained, "meta")):
        for step in range(3):
            ids, offsets = batch(step).reshape(-1), torch.tensor([0, 3, 3, 20])
            with torch.device(device):
                (module(ids, offsets) + module(ids.view(BAGS, -1)).sum() - 1).square().mean().backward()
    assert torch.equal(trained.weight, bag.weight)


def test_the_weight_of_shards_may_be_written_and_not_trained(alone: None) -> None:
    shards = AdaptiveEmbedding(ROWS, DIM, training="sharded")
    with torch.no_grad():
        shards.weight.copy_(torch.arange(ROWS).unsqueeze(1).expand(-1, DIM))
    assert shards(torch.tensor([1, 2]))[:, 0].tolist() == [1.0, 2.0]
    refused = {
        "frozen, thawed or made a parameter": lambda: shards.weight.requires_grad_(False),
        "given to an optimizer": lambda: torch.optim.SGD([shards.weight], lr=0.1),
        "asked for a gradient": lambda: nn.functional.linear(shards(torch.tensor([1])), shards.weight),
        "replaced by a parameter": lambda: setattr(shards, "weight", nn.Parameter(torch.ones(ROWS, DIM))),
    }
    way_out = "take training = 'dense' or 'sparse' with budget = 1.0, of which weight is a parameter"
    for what, action in refused.items():
        with pytest.raises(RuntimeError, match=rf"^weight of this table is {what}.*{way_out}$"):
            action()


def test_shards_begin_with_values_of_their_own(as_rank: Any) -> None:
    made = []
    for rank in range(2):
        as_rank(rank, 2)
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            made.append(AdaptiveEmbeddingBag(ROWS - 1, DIM, training="sharded").weight.clone())
    for first, again, other in (made[:3], made[3:]):
        assert torch.equal(first, again)
        assert not (first == other).any()
        assert 0.8 < first.std() < 1.2
    assert not (made[0] == made[3]).any()


@pytest.mark.parametrize(
    ("rows", "budget", "expected"),
    [
        (ROWS, 2 * ROWS, [38, 36]),
        (ROWS, 20, [10, 9]),
        (ROWS, 1, [1, 1]),
        (1, 2, [2, 0]),  # rank 1 has no row
    ],
)
def test_a_number_of_chunks_is_shared_out_by_rows(as_rank: Any, rows: int, budget: int, expected: list[int]) -> None:
    for rank in range(2):
        as_rank(rank, 2)
        made = AdaptiveEmbeddingBag(rows, DIM, budget=budget, chunk_dim=4, training="sharded")
        assert made.budget_chunks == expected[rank]


@pytest.mark.parametrize("budget", [0, 2 * ROWS + 1])
def test_the_chunks_of_shards_are_counted_over_all_ranks(as_rank: Any, budget: int) -> None:
    for rank in range(2):
        as_rank(rank, 2)
        with pytest.raises(ValueError, match=f"^budget = {budget}: allowed 1..74 chunks, or a share as a float$"):
            AdaptiveEmbeddingBag(ROWS, DIM, budget=budget, chunk_dim=4, training="sharded")


def test_the_state_of_another_ranks_shard_is_refused(as_rank: Any) -> None:
    saved = []
    for rank in range(2):
        as_rank(rank, 2)
        bag = AdaptiveEmbeddingBag(8, DIM, training="sharded", optimizer="sgd")
        saved.append((copy.deepcopy(bag.state_dict()), bag.weight.clone()))
    for rank in range(2):
        as_rank(rank, 2)
        other = 1 - rank
        bag = AdaptiveEmbeddingBag(8, DIM, training="sharded", optimizer="sgd")
        before = bag.weight.clone()
        says = f"shard: saved by rank {other} of 2, of a table of 8 rows; this is rank {rank} of 2, of 8"
        with pytest.raises(RuntimeError, match=says):
            bag.load_state_dict(saved[other][0])
        assert torch.equal(bag.weight, before)
        old = dict(saved[other][0])  # of a version that did not say
        old.pop("shard")
        bag.load_state_dict(old)
        assert torch.equal(bag.weight, saved[other][1])
        bag.load_state_dict(saved[rank][0])
        assert torch.equal(bag.weight, saved[rank][1])
