"""Replicas of adaptive tables under DDP against one process that sees every rank's batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adaptive import DIM, ROWS, STEPS, batch, loss
from harness import Rank, run_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.nn import AdaptiveEmbeddingBag, ChunkPruner


def table(layout: str = "direct", **options: Any) -> AdaptiveEmbeddingBag:
    given = {"budget": 0.4, "chunk_dim": 4, "layout": layout, "mode": "sum", "sparse": True, "init_std": 0.1}
    return AdaptiveEmbeddingBag(ROWS, DIM, **given | options)


def train_sparse(rank: Rank, layout: str) -> dict[str, Tensor]:
    rank.init("gloo")
    module = table(layout)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    pruner = ChunkPruner(ddp, optimizer=optimizer, first=1, growth=1.0, interval=3, hysteresis=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(ddp(batch(rank.rank, step))).backward()
        optimizer.step()
        pruner.step()
    return {name: value.clone() for name, value in module.state_dict().items()} | {"weight": module.weight}


@pytest.mark.parametrize("layout", ["direct", "hash", "sketch"])
def test_replicas_decide_alike(layout: str) -> None:
    states = run_ranks(train_sparse, 3, layout)
    for state in states[1:]:
        for name in ("pool", "index", "seen", "weight"):
            assert torch.equal(state[name], states[0][name]), name
    assert (states[0]["weight"] != 0).sum() > 50


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
    if compiled == "inside":
        model.compile(backend="eager")
    ddp = DistributedDataParallel(model)
    if compiled == "outside":
        ddp.compile(backend="eager")
    return ddp


COMPILED = pytest.mark.parametrize("compiled", ["", "inside", "outside"])


def start_from_rank_0(rank: Rank, compiled: str) -> Tensor:
    rank.init("gloo")
    module = table("hash", sparse=False)
    ids = torch.arange(ROWS).unsqueeze(1)
    if rank.rank == 0:
        module._take(torch.randn(ROWS, DIM))
    ddp = in_ddp(module, compiled)
    # What was compiled outside of DDP does not hold in it; torch 2.11 takes it all the same (docs/guide/embeddings.md).
    if compiled == "inside" and not torch.__version__.startswith("2.11"):
        module(ids)
    return ddp(ids).detach()


@COMPILED
def test_ddp_begins_with_the_table_of_rank_0(compiled: str) -> None:
    first, second = run_ranks(start_from_rank_0, 2, compiled)
    assert first.any()
    assert torch.equal(first, second)


def loaded_by_rank_0(rank: Rank, compiled: str) -> tuple[Tensor, Tensor, Tensor]:
    rank.init("gloo")
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


@COMPILED
def test_a_table_that_rank_0_has_loaded_is_sent_when_it_is_wrapped_again(compiled: str) -> None:
    if compiled and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 takes what was compiled elsewhere (docs/guide/embeddings.md)")
    (before, first, index), (_, second, other) = run_ranks(loaded_by_rank_0, 2, compiled)
    assert not before.any()
    assert first.any()
    assert torch.equal(first, second)
    assert torch.equal(index, other)


def compiled_whole_in_ddp(rank: Rank) -> tuple[str, bool]:
    rank.init("gloo")
    module = table(sparse=False)
    module.compile(backend="eager", fullgraph=True)
    ddp, ids = DistributedDataParallel(module), batch(rank.rank, 0)
    try:
        ddp(ids)
    except torch._dynamo.exc.Unsupported as error:
        refusal = str(error)
    module._compiled_call_impl = None
    ddp(ids)
    module.compile(backend="eager", fullgraph=True)
    return refusal, ddp(ids).requires_grad


def test_the_first_pass_in_ddp_is_no_full_graph_and_says_so() -> None:
    for refusal, trained in run_ranks(compiled_whole_in_ddp, 2):
        assert "run one forward pass in DDP before compiling" in refusal
        assert trained


def fused_in_ddp(rank: Rank, compiled: str) -> str:
    rank.init("gloo")
    model = nn.Sequential(table(sparse=False, training="fused"), nn.Linear(DIM, 1))
    try:
        in_ddp(model, compiled)(batch(rank.rank, 0))
    except RuntimeError as error:
        return str(error)
    return "no error"


@COMPILED
def test_a_fused_table_in_ddp_is_refused_with_the_way_out(compiled: str) -> None:
    for text in run_ranks(fused_in_ddp, 2, compiled):
        assert "replicas would differ" in text
        assert "training='sparse'" in text
        assert "training='sharded'" in text


def shared_budget_in_ddp(rank: Rank) -> list[str]:
    rank.init("gloo")
    model = Two()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refusals = []
    try:
        ChunkPruner(ddp, optimizer=optimizer, shared_budget=20)
    except ValueError as error:
        refusals.append(str(error))
    pruner = ChunkPruner(model, optimizer=optimizer, shared_budget=20)  # cannot know yet
    loss(ddp(batch(rank.rank, 0))).backward()
    try:
        pruner.prune()
    except ValueError as error:
        refusals.append(str(error))
    try:
        model.first.load_state_dict(table(sparse=False, budget=3).state_dict())
    except RuntimeError as error:
        refusals.append(str(error))
    return refusals


class Two(nn.Module):
    """Tables that could share a budget."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = table(sparse=False), table(sparse=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids)


def test_a_shared_budget_in_ddp_is_refused_with_the_way_out() -> None:
    for refusals in run_ranks(shared_budget_in_ddp, 2):
        before, pruning, loading = refusals
        assert "Leave shared_budget out" in before
        assert pruning == before
        assert "pool: another number of slots inside DDP; load before" in loading


def prune_one_by_itself(rank: Rank, training: str) -> tuple[str, list[Tensor], bool]:
    rank.init("gloo")
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


@pytest.mark.parametrize("training", ["dense", "sparse"])
def test_one_replica_cannot_be_pruned_by_what_it_alone_has_observed(training: str) -> None:
    first, second = run_ranks(prune_one_by_itself, 2, training)
    for refusal, _, kept in (first, second):
        assert refusal.startswith("prune() of a table inside DistributedDataParallel")
        assert "Take ChunkPruner.prune() on all ranks, or prune a copy" in refusal
        assert kept
    (one_alone, one), (other_alone, other) = first[1], second[1]
    assert not torch.equal(one_alone, other_alone)  # which is why
    assert torch.equal(one, other)


def prune_alone_in_ddp(rank: Rank) -> dict[str, int]:
    rank.init("gloo")
    model = table()
    loss(DistributedDataParallel(model)(batch(rank.rank, 0))).backward()
    return model.prune(optimizer=torch.optim.SGD(model.parameters(), lr=0.5))


def test_the_only_replica_is_pruned_by_itself() -> None:
    assert run_ranks(prune_alone_in_ddp, 1)[0]["admitted"] > 5


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
    rank.init(
        "dear" if form else "gloo",
        pg_options=torchext.DeAROptions(form=form, allreduce_fallback=False) if form else None,
    )
    model = DistributedDataParallel(table(sparse=False))
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
    for text in run_ranks(prune_with_dear, 2, "sharded", 0.9):
        assert "state 'momentum_buffer' has shape" in text
        assert "form='replicated'" in text
    for form, momentum in (("replicated", 0.9), ("sharded", 0.0)):
        expected = run_ranks(prune_with_dear, 2, "", momentum)[0]
        for weight in run_ranks(prune_with_dear, 2, form, momentum):
            torch.testing.assert_close(weight, expected)


def prune_with_zero(rank: Rank, zero: bool) -> tuple[Tensor, int]:
    rank.init("gloo")
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
    expected, swapped = run_ranks(prune_with_zero, 2, False)[0]
    assert swapped > 0
    for weight, _ in run_ranks(prune_with_zero, 2, True):
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
