"""Replicas of adaptive tables under DDP against one process that sees every rank's batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from adaptive import DIM, ROWS, STEPS, batch, loss
from attached import new_group
from harness import Rank, run_ranks
from rows import values_in_one_group
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.nn import AdaptiveEmbeddingBag, ChunkPruner


def table(layout: str = "direct", **options: Any) -> AdaptiveEmbeddingBag:
    given = {"budget": 0.4, "chunk_dim": 4, "layout": layout, "mode": "sum", "sparse": True, "init_std": 0.1}
    return AdaptiveEmbeddingBag(ROWS, DIM, **given | options)


def train_sparse(rank: Rank, layout: str) -> tuple[dict[str, Tensor], int]:
    module = table(layout)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    pruner = ChunkPruner(ddp, optimizer=optimizer, first=1, growth=1.0, interval=3, hysteresis=0.0)
    dropped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp(batch(rank.rank, step))).backward()
        optimizer.step()
        dropped += (pruner.step() or {"dropped": 0})["dropped"]
    state = {name: value.clone() for name, value in module.state_dict().items()} | {"weight": module.weight}
    return state, dropped


def test_replicas_decide_alike() -> None:
    cases = {layout: (train_sparse, layout) for layout in ("direct", "hash", "sketch")}
    for layout, ((first, dropped), *others) in values_in_one_group(cases, 3).items():
        for state, _ in others:
            for name in ("pool", "index", "seen", "weight"):
                assert torch.equal(state[name], first[name]), (layout, name)
        assert (first["weight"] != 0).sum() > 50, layout
        assert dropped > 0, layout


def test_sparse_gradients_under_ddp_equal_one_process() -> None:
    def single() -> Tensor:
        module = table("auto", budget=1.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(module(torch.cat([batch(rank, step) for rank in range(2)]))).backward()
            optimizer.step()
        return module.weight.detach()

    torch.manual_seed(0)
    expected = single()
    for weight in run_ranks(train_whole, 2):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def train_whole(rank: Rank) -> Tensor:
    torch.manual_seed(rank.rank)  # DDP makes the ranks begin alike
    rank.init("gloo")
    module = table("auto", budget=1.0)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp(batch(rank.rank, step))).backward()
        optimizer.step()
    return module.weight.detach().clone()


def in_ddp(model: nn.Module, compiled: str) -> nn.Module:
    """The model in DDP, as it is or compiled from within or from without."""
    torch._dynamo.reset()
    if compiled == "inside":
        model.compile(backend="eager")
    ddp = DistributedDataParallel(model)
    if compiled == "outside":
        ddp.compile(backend="eager")
    return ddp


COMPILED = ("", "inside", "outside")


def start_from_rank_0(rank: Rank, compiled: str) -> Tensor:
    module = table("hash", sparse=False)
    ids = torch.arange(ROWS).unsqueeze(1)
    if rank.rank == 0:
        module._take(torch.randn(ROWS, DIM))
    ddp = in_ddp(module, compiled)
    # What was compiled outside of DDP does not hold in it; torch 2.11 takes it all the same (docs/guide/embeddings.md).
    if compiled == "inside" and not torch.__version__.startswith("2.11"):
        module(ids)
    return ddp(ids).detach()


def test_ddp_begins_with_the_table_of_rank_0() -> None:
    cases = {f"compiled {how}": (start_from_rank_0, how) for how in COMPILED}
    for name, (first, second) in values_in_one_group(cases, 2).items():
        assert first.any(), name
        assert torch.equal(first, second), name


def loaded_by_rank_0(rank: Rank, compiled: str) -> tuple[Tensor, Tensor, Tensor]:
    module, ids = table("hash", sparse=False), torch.arange(ROWS).unsqueeze(1)
    first = in_ddp(module, compiled)
    before = first(ids)
    before.sum().backward()
    if rank.rank == 0:
        other = table("hash", sparse=False)
        other._take(torch.randn(ROWS, DIM))
        module.load_state_dict(other.state_dict())
    again = in_ddp(module, compiled)
    outputs = [again(ids) for _ in range(2)]
    assert torch.equal(*outputs)
    outputs[1].sum().backward()
    return before.detach(), outputs[0].detach(), module.index


def test_a_table_that_rank_0_has_loaded_is_sent_when_it_is_wrapped_again() -> None:
    # torch 2.11 takes what was compiled elsewhere (docs/guide/embeddings.md).
    ways = COMPILED[:1] if torch.__version__.startswith("2.11") else COMPILED
    cases = {f"compiled {how}": (loaded_by_rank_0, how) for how in ways}
    for name, ((before, first, index), (_, second, other)) in values_in_one_group(cases, 2).items():
        assert not before.any(), name
        assert first.any(), name
        assert torch.equal(first, second), name
        assert torch.equal(index, other), name


class Two(nn.Module):
    """Tables that could share a budget."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = table(sparse=False), table(sparse=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids)


def prune_one_by_itself(rank: Rank, training: str) -> tuple[str, list[Tensor], bool]:
    torch.manual_seed(0)
    model = table(training=training, sparse=False)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss(ddp(batch(rank.rank, 0))).backward()  # every rank observes something else
    optimizer.step()
    held = model.index.clone()
    refusal = ""
    try:
        model.prune(optimizer=optimizer)
    except RuntimeError as error:
        refusal = str(error)
    kept = torch.equal(model.index, held)
    alone = copy.deepcopy(model)
    alone.prune()
    ChunkPruner(ddp, optimizer=optimizer).prune()
    whole = table("auto", budget=1.0, sparse=False)
    DistributedDataParallel(whole)(batch(rank.rank, 0))
    assert set(whole.prune().values()) == {0}  # everything stays everywhere
    return refusal, [alone.index, model.index], kept


def test_one_replica_cannot_be_pruned_by_what_it_alone_has_observed() -> None:
    cases = {training: (prune_one_by_itself, training) for training in ("dense", "sparse")}
    for training, (first, second) in values_in_one_group(cases, 2).items():
        for refusal, _, kept in (first, second):
            assert refusal.startswith("prune() of a table inside DistributedDataParallel"), training
            assert "Take ChunkPruner.prune() on all ranks, or prune a copy" in refusal, training
            assert kept, training
        (one_alone, one), (other_alone, other) = first[1], second[1]
        assert not torch.equal(one_alone, other_alone), training  # which is why
        assert torch.equal(one, other), training


class Branching(nn.Module):
    """A whole table that not every pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = table("auto", budget=1.0, sparse=False), nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, branch: bool) -> Tensor:
        return self.scale * (self.table(ids) if branch else torch.ones(len(ids), DIM))


def branch_of_one_rank(rank: Rank) -> Tensor:
    rank.init("gloo", timeout=20)
    torch.manual_seed(rank.rank)
    model = Branching()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(3):
        loss(ddp(batch(rank.rank, step), rank.rank == 0 or step > 0)).backward()
    assert model.table.weight.grad is not None
    return torch.stack([model.table.weight.detach(), model.table.weight.grad])


def test_a_whole_table_need_not_be_used_by_all_ranks() -> None:
    first, second = run_ranks(branch_of_one_rank, 2)
    assert torch.equal(first, second)
    assert first[1].any()


def prune_two_models(rank: Rank) -> Tensor:
    rank.init("gloo", timeout=20)
    torch.manual_seed(0)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = table(budget=0.4 if rank.rank < 2 else 0.2)
    ddp = DistributedDataParallel(model, process_group=pairs[rank.rank // 2])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    pruner = ChunkPruner(ddp, optimizer=optimizer, first=2, growth=1.0, interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp(batch(rank.rank, step))).backward()
        optimizer.step()
        pruner.step()
    return model.weight


def test_replicas_are_those_of_the_tables_ddp() -> None:
    weights = run_ranks(prune_two_models, 4)
    for pair in (weights[:2], weights[2:]):
        assert pair[0].any()
        assert torch.equal(pair[0], pair[1])
    assert not torch.equal(weights[0], weights[2])


def prune_with_dear(rank: Rank, form: str, momentum: float) -> str | Tensor:
    group = new_group("dear", form=form, allreduce_fallback=False) if form else None
    model = DistributedDataParallel(table(sparse=False), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    synchronizer = torchext.attach(model, optimizer) if form else None
    pruner = ChunkPruner(model, optimizer=optimizer, first=2, growth=1.0, interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(batch(rank.rank, step))).backward()
        optimizer.step()
        try:
            pruner.step()
        except ValueError as error:
            return str(error)
    if synchronizer is not None:
        synchronizer.wait()
    return model.module.weight


def test_dears_state_moves_with_the_chunks_or_is_refused() -> None:
    ways = [(form, momentum) for form in ("", "replicated", "sharded") for momentum in (0.9, 0.0)]
    found = values_in_one_group({f"{form} {momentum}": (prune_with_dear, form, momentum) for form, momentum in ways}, 2)
    for text in found["sharded 0.9"]:
        assert "state 'momentum_buffer' has shape" in text
        assert "form='replicated'" in text
    for form, momentum in (("replicated", 0.9), ("sharded", 0.0)):
        for weight in (found[f" {momentum}"][1], *found[f"{form} {momentum}"]):
            torch.testing.assert_close(weight, found[f" {momentum}"][0], msg=form)


def prune_with_zero(rank: Rank, zero: bool) -> tuple[Tensor, int]:
    model = DistributedDataParallel(Two())
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pruner = ChunkPruner(model, optimizer=optimizer, first=2, growth=1.0, interval=2, max_swap_share=0.3)
    swapped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(batch(rank.rank, step))).backward()
        optimizer.step()
        done = pruner.step()
        swapped += done["dropped"] + done["moved"] if done else 0
    return torch.stack([model.module.first.weight, model.module.second.weight]), swapped


def test_the_state_that_zero_keeps_on_the_rank_that_steps_moves_with_the_chunks() -> None:
    found = values_in_one_group({"plain": (prune_with_zero, False), "zero": (prune_with_zero, True)}, 2)
    expected, swapped = found["plain"][0]
    assert swapped > 0
    for weight, _ in found["zero"]:
        torch.testing.assert_close(weight, expected)


def diverged(rank: Rank) -> str:
    rank.init("gloo")
    module = table()
    if rank.rank == 1:
        module._take(torch.randn(ROWS, DIM))
    try:
        ChunkPruner(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1)).prune()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_replicas_that_differ_are_noticed_on_every_rank() -> None:
    for text in run_ranks(diverged, 2):
        assert "replicas differ: rank 1 has other chunks" in text
