"""Tables whose rows are shared out over the ranks, against one process that sees every rank's batches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adaptive import BAGS, DIM, ROWS, STEPS, batch, loss
from harness import Rank, run_ranks
from rows import row, values_in_one_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner

pytestmark = pytest.mark.sanitize


def sharded(rank: Rank, mode: str, optimizer: str, padding: int | None) -> tuple[Tensor, list[Tensor], Any, int]:
    bag = AdaptiveEmbeddingBag(
        ROWS, DIM, mode=mode, training="sharded", optimizer=optimizer, lr=0.3, padding_idx=padding, dtype=torch.float64
    )
    whole = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    bag._take(whole[rank.rank :: rank.size])
    model = DistributedDataParallel(Around(bag))  # DDP must leave the shards alone
    outputs = []
    weights = None
    for step in range(STEPS):
        ids = batch(rank.rank, step, 3 + rank.rank)
        weights = torch.linspace(-1, 1, ids.numel(), dtype=torch.float64).view(ids.shape) if mode == "sum" else None
        if weights is not None:
            weights.requires_grad_()
        output = model(ids, weights)
        loss(output).backward()
        outputs.append(output.detach())
    gradient = None if weights is None else weights.grad
    return bag.weight.clone(), outputs, gradient, sum(value.numel() for value in bag.parameters())


class Around(nn.Module):
    """A module as users write it: an embedding and something that DDP trains."""

    def __init__(self, bag: AdaptiveEmbeddingBag) -> None:
        super().__init__()
        self.bag = bag
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, ids: Tensor, weights: Tensor | None) -> Tensor:
        return self.bag(ids, None, weights) * self.scale


def check_against_one_process(ranks: list[Any], mode: str, optimizer: str, padding: int | None) -> None:
    world = len(ranks)
    reference = AdaptiveEmbeddingBag(
        ROWS, DIM, mode=mode, training="fused", optimizer=optimizer, lr=0.3, padding_idx=padding, dtype=torch.float64
    )
    reference._take(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64))
    expected: list[list[Tensor]] = []
    gradients: list[Tensor | None] = []
    for step in range(STEPS):
        parts = [batch(rank, step, 3 + rank) for rank in range(world)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        sizes = torch.cat([torch.full((len(part),), part.shape[1]) for part in parts])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
        weights = None
        if mode == "sum":
            weights = torch.cat([torch.linspace(-1, 1, part.numel(), dtype=torch.float64) for part in parts])
            weights.requires_grad_()
        outputs = reference(flat, offsets, weights).split(BAGS)
        expected.append([output.detach() for output in outputs])
        # DDP's mean over the ranks of each one's mean.
        torch.stack([loss(output) for output in outputs]).mean().backward()
        gradients = [] if weights is None else list(weights.grad.split([part.numel() for part in parts]))  # type: ignore[union-attr]
    for rank, (weight, outputs_of_rank, gradient, owned) in enumerate(ranks):
        torch.testing.assert_close(weight, reference.weight[rank::world])
        for step, output in enumerate(outputs_of_rank):
            torch.testing.assert_close(output, expected[step][rank])
        if gradient is not None:
            wanted = gradients[rank]
            assert wanted is not None
            torch.testing.assert_close(gradient.reshape(-1), wanted * world)  # this rank's loss, not the mean
        assert owned <= (ROWS // world + 1) * DIM


# Three is the first world whose ranks differ in more than who is first and who last.
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_equal_one_process(world: int) -> None:
    ways: list[tuple[str, str, int | None]] = [("sum", "adagrad", None), ("mean", "sgd", 5), ("sum", "adam", 0)]
    found = values_in_one_group({way[1]: (sharded, *way) for way in ways}, world)
    for way in ways:
        with row(way):
            check_against_one_process(found[way[1]], *way)


def weighted_differently(rank: Rank, given: tuple[str, ...], freeze: bool) -> None:
    """given, by rank of a group of the first ones: weights that need a gradient, others, or none."""
    size = len(given)
    group = dist.new_group(range(size))
    if rank.rank >= size:
        return
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 1.0, "dtype": torch.float64, "process_group": group}
    bag = AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", training="sharded", **options)
    whole = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)
    bag._take(whole.detach())
    bag.requires_grad_(not freeze)
    # Here every rank's batch at once, by torch.
    batches = [batch(number, 0) for number in range(size)]
    weights = [
        torch.ones(ids.shape, dtype=torch.float64) if how == "none" else torch.linspace(-1, 1, ids.numel()).double()
        for how, ids in zip(given, batches, strict=True)
    ]
    weights = [tensor.view(ids.shape).requires_grad_() for tensor, ids in zip(weights, batches, strict=True)]
    expected = [
        nn.functional.embedding_bag(ids, whole, mode="sum", per_sample_weights=tensor)
        for ids, tensor in zip(batches, weights, strict=True)
    ]
    torch.stack([loss(output) for output in expected]).mean().backward()
    own = weights[rank.rank].detach().clone().requires_grad_(given[rank.rank] == "gradient")
    output = bag(batches[rank.rank], None, None if given[rank.rank] == "none" else own)
    loss(output).backward()
    torch.testing.assert_close(output, expected[rank.rank])
    if own.requires_grad:
        torch.testing.assert_close(own.grad, weights[rank.rank].grad * size)  # of this rank's loss, not the mean
    trained = whole.detach() if freeze else whole.detach() - whole.grad
    torch.testing.assert_close(bag.weight, trained[rank.rank :: size])


WEIGHTS: list[tuple[tuple[str, ...], bool]] = [
    (("gradient", "plain"), False),
    (("plain", "gradient"), True),
    (("none", "gradient"), False),
    (("gradient", "none", "plain"), True),
    (("plain", "none", "none"), False),
]


def test_weights_that_only_some_ranks_give_or_train() -> None:
    cases = {f"{given}, frozen {freeze}": (weighted_differently, given, freeze) for given, freeze in WEIGHTS}
    values_in_one_group(cases, 3, timeout=20)


def shards_of_a_whole_table(rank: Rank) -> tuple[list[Tensor], str]:
    rank.init("gloo")
    whole = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9))
    options: dict[str, Any] = {"training": "sharded", "mode": "sum"}
    made = AdaptiveEmbeddingBag.from_pretrained(whole, **options)
    loaded = AdaptiveEmbeddingBag(ROWS, DIM, process_group=dist.new_group([0, 1]), **options)
    loaded.load_state_dict({"weight": whole})
    try:
        pickle.dumps(loaded)
    except TypeError as error:
        refusal = str(error)
    tables = (made, loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(made)))
    return [table(torch.arange(ROWS).unsqueeze(1)).detach() for table in tables], refusal


def test_shards_take_their_share_of_a_whole_table_and_can_be_copied() -> None:
    whole = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9))
    for outputs, refusal in run_ranks(shards_of_a_whole_table, 2):
        assert all(torch.equal(output, whole) for output in outputs)
        assert "cannot be pickled; save state_dict() of each rank" in refusal


def sharded_with_empty_batches(rank: Rank) -> tuple[list[Tensor], Tensor]:
    rank.init("gloo")
    bag = AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", training="sharded", optimizer="sgd", lr=1.0)
    single = AdaptiveEmbedding(ROWS, DIM, training="sharded", optimizer="sgd", lr=1.0)
    for module in (bag, single):
        module._take(torch.zeros(module.num_embeddings, DIM))
    outputs = []
    for module, shape in ((bag, (0, 3)), (bag, (3, 0)), (bag, (0,)), (single, (0, 4)), (single, (0,))):
        given = torch.zeros(shape if rank.rank == 1 else (2, 3), dtype=torch.int64)
        offsets = torch.zeros(0, dtype=torch.int64) if given.dim() == 1 and module is bag else None
        output = module(given) if offsets is None else module(given, offsets)
        output.sum().backward()
        outputs.append(output.detach())
    return outputs, torch.stack([bag.weight[0], single.weight[0]])


def test_a_rank_with_an_empty_batch_takes_part() -> None:
    (full, trained), (empty, _) = run_ranks(sharded_with_empty_batches, 2)
    assert [output.shape for output in empty] == [(0, DIM), (3, DIM), (0, DIM), (0, 4, DIM), (0, DIM)]
    assert not any(output.any() for output in empty)
    # Six ids at half the gradient, as the mean over two ranks: -3 a batch; a bag holds three of them.
    assert torch.equal(trained, torch.tensor([[-9.0], [-6.0]]).expand(2, DIM))
    assert [output.flatten()[0].item() for output in full] == [0.0, -9.0, -18.0, 0.0, -3.0]


def sharded_pruning(rank: Rank) -> tuple[int, int, Tensor]:
    rank.init("gloo")
    bag = AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", training="sharded", budget=0.25, chunk_dim=4, init_std=0.0)
    with pytest.raises(ValueError, match=r"process_group = .*: allowed for replicas, and all tables are shards"):
        ChunkPruner(bag, process_group=dist.group.WORLD)
    pruner = ChunkPruner(bag, first=1, interval=2)
    for step in range(20):
        loss(bag(batch(rank.rank, step))).backward()
        pruner.step()
    assert dist.get_world_size() == rank.size
    return bag.budget_chunks, bag.stats()["resident_chunks"], bag(torch.arange(ROWS).unsqueeze(1)).detach()


def test_shards_prune_their_own_rows() -> None:
    results = run_ranks(sharded_pruning, 2)
    for budget, resident, everything in results:
        assert 0 < resident <= budget <= 10
        assert torch.equal(everything, results[0][2])
        assert everything.any()


def shards_beside_a_replica(rank: Rank) -> tuple[Tensor, Tensor, Tensor, str]:
    rank.init("gloo")
    # All of rank 1's only row is resident, of rank 0's rows not.
    few = AdaptiveEmbeddingBag(3, 16, mode="sum", training="sharded", budget=0.9, chunk_dim=4)
    options: dict[str, Any] = {"mode": "sum", "training": "sharded", "budget": 0.8, "chunk_dim": 4}
    first, second = (AdaptiveEmbeddingBag(64, 16, **options) for _ in range(2))
    replica = AdaptiveEmbeddingBag(ROWS, DIM, mode="sum", budget=0.4, chunk_dim=4)
    ddp = DistributedDataParallel(replica)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    few(torch.arange(3).view(-1, 1)).sum().backward()
    for bag in (first, second):
        bag(torch.arange(64).view(-1, 1)).sum().backward()
    loss(ddp(batch(rank.rank, 0))).backward()
    ChunkPruner([few, ddp, first, second], optimizer=optimizer).prune()
    return first.weight, second.weight, replica.weight, few.layout


def test_rows_that_are_admitted_begin_with_other_values_in_each_shard_and_table() -> None:
    (first, second, replica, few), (other_first, other_second, other_replica, other_few) = run_ranks(
        shards_beside_a_replica, 2
    )
    assert few != other_few == "identity"
    assert torch.equal(replica, other_replica)
    assert replica.any()
    made = [first, second, other_first, other_second]
    for at, one in enumerate(made):
        assert (one != 0).sum() > 400
        for other in made[:at]:
            assert not (one == other).logical_and(one != 0).any()


def shards_with_a_shared_budget(rank: Rank) -> tuple[list[int], int, list[str]]:
    rank.init("gloo")
    options: dict[str, Any] = {"mode": "sum", "training": "sharded", "budget": 0.3, "chunk_dim": 4}
    tables = [AdaptiveEmbeddingBag(rows, DIM, **options) for rows in (ROWS, 20)]
    refused = []
    for modules, budget in ((tables, 5), (tables, 115), ([*tables, AdaptiveEmbeddingBag(9, DIM, budget=0.5)], 60)):
        try:
            ChunkPruner(modules, shared_budget=budget)
        except ValueError as error:
            refused.append(str(error))
    pruner = ChunkPruner(tables, first=1, growth=1.0, interval=1, shared_budget=61, max_swap_share=1.0)
    sizes = []
    for step in range(8):
        tables[0](batch(rank.rank, step)).sub(1).square().sum().backward()
        tables[1](batch(rank.rank, step) % 3).sub(1).square().sum().backward()
        pruner.step()
        sizes.append(sum(table.budget_chunks for table in tables))
    return sizes, tables[1].stats()["resident_chunks"], refused


def test_a_shared_budget_of_shards_is_that_of_all_ranks() -> None:
    results = run_ranks(shards_with_a_shared_budget, 3)
    for (sizes, of_few, refused), part in zip(results, (21, 20, 19), strict=True):  # of 61, by 20, 19 and 18 rows
        assert set(sizes) == {part}
        assert of_few == 2  # all that it uses
        assert refused[0] == "shared_budget = 5: allowed 6..114 chunks"
        assert refused[1] == "shared_budget = 115: allowed 6..114 chunks"
        assert "for shards or for replicas, and these are both" in refused[2]
