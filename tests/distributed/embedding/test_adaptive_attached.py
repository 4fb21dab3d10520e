"""Adaptive tables whose replicas an attached backend averages: pruned where all of them are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import new_group
from harness import Rank, run_ranks
from rows import row, values_in_one_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.nn import AdaptiveEmbedding, ChunkPruner

pytestmark = pytest.mark.sanitize

ROWS, DIM = 64, 16
# Averages are under way when a table is pruned, or models that are several steps old are averaged later.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {"order": "cta"}),
    ("prague", {"order": "cta", "generator": "static"}),
    ("prague", {"order": "atc"}),
    ("dssync", {"order": "cta"}),
    ("dssync", {"order": "atc"}),
    ("hop", {"order": "parallel"}),
    ("hop", {"order": "serial"}),
    ("hop", {"staleness": 5}),
    ("hop", {"backup_workers": 1, "max_iteration_gap": 4}),
]


class Attached:
    """A table with a head in DDP, attached; a learning rate of 0, so that nothing but averages changes values."""

    def __init__(self, backend: str, *, wrapped: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.table = AdaptiveEmbedding(ROWS, DIM, budget=0.25, chunk_dim=4, layout="direct", init_std=0.0)
        self.group = new_group(backend, **options)
        self.ddp = DistributedDataParallel(nn.Sequential(self.table, nn.Linear(DIM, 1)), process_group=self.group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.0, momentum=0.9)
        self.pruner = self.make_pruner(self.ddp if wrapped else self.table)  # before the model is attached
        self.sync = torchext.attach(self.ddp, self.optimizer)

    def make_pruner(self, module: nn.Module, **options: Any) -> ChunkPruner:
        given = {"first": 1, "growth": 1.0, "interval": 1, "hysteresis": 0.0, **options}
        return ChunkPruner(module, optimizer=self.optimizer, **given)

    def backward(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        self.ddp(ids).square().mean().backward()


def body_values(rank: Rank, backend: str, options: dict[str, Any], wrapped: bool) -> tuple[int, Tensor]:
    model = Attached(backend, wrapped=wrapped, **options)
    table, admitted, seen = model.table, 0, []
    generator = torch.Generator().manual_seed(rank.rank)  # every worker observes something else
    for step in range(20):
        model.backward((torch.rand(24, generator=generator) ** 2 * ROWS).long())
        keys, slots = table._resident()
        if step % 2:  # replicas differ, each chunk by its key, as they do after steps of their own
            with torch.no_grad():
                table.pool[slots] = ((keys + 1.0) * (1 + rank.rank)).unsqueeze(1).expand(-1, 4)
        model.optimizer.step()
        if step % 2 == 0:
            continue
        assert model.pruner.step() is not None
        held = set(keys.tolist())
        pruned = table.weight.view(-1, 4).clone()
        for _ in range(2):  # what was under way would be there after these
            model.backward((torch.rand(24, generator=generator) ** 2 * ROWS).long())
            model.optimizer.step()
        model.sync.synchronize()  # nobody is ahead and writes already
        # Chunks that stay hold a mean of what replicas held, which nothing moves any more; admitted ones are zero.
        torch.testing.assert_close(table.weight.view(-1, 4), pruned)
        for key in table._resident()[0].tolist():
            value = float(pruned[key, 0])
            if key in held:
                assert (key + 1) * (1 - 1e-5) <= value <= (key + 1) * rank.size * (1 + 1e-5), (step, key, value)
            else:
                admitted += 1
                assert value == 0, (step, key, value)
        seen.append(torch.cat([table.index, pruned.flatten()]))
    return admitted, torch.stack(seen)


def test_no_average_brings_back_what_was_before_a_pruning() -> None:
    cases: dict[str, Any] = {
        "-".join([backend, *map(str, options.values())]): (body_values, backend, options, True)
        for backend, options in VARIANTS
    }
    # A pruner of the module, too, knows of the wrapper that is attached.
    cases["the module's pruner"] = (body_values, "dssync", {}, False)
    for name, ((admitted, seen), *others) in values_in_one_group(cases, 3, deadline=120).items():
        with row(name):
            assert admitted > 20
            for other in others:
                assert torch.equal(other[1], seen)


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def body_refused(rank: Rank) -> list[str]:
    rank.init("gloo")
    model = Attached("hop", max_jump=10, max_iteration_gap=4, backup_workers=1)
    model.backward(torch.arange(ROWS))
    before = model.table.index.clone()
    found = [refusal(model.pruner.prune), refusal(lambda: model.make_pruner(model.ddp))]
    model = Attached("prague")
    model.backward(torch.arange(ROWS))
    found.append(refusal(lambda: model.table.prune(optimizer=model.optimizer)))
    found.append(refusal(lambda: model.make_pruner(model.table, shared_budget=32).prune()))
    found.append(refusal(lambda: model.make_pruner(model.table, process_group=dist.group.WORLD)))
    assert torch.equal(model.table.index, before)
    if rank.rank == 0:  # a step more than the others
        model.table(torch.arange(ROWS)).sum().backward()
    found.append(refusal(model.pruner.prune))
    return found


def test_what_cannot_be_pruned_where_replicas_are_averaged_is_refused() -> None:
    for skips, early, alone, shared, group, uneven in run_ranks(body_refused, 3):
        assert skips == early
        assert skips.startswith("ValueError: HopOptions.max_jump = 10: workers that skip iterations")
        assert alone.startswith("RuntimeError: prune() of a table whose replicas an attached backend averages")
        assert "Take ChunkPruner.prune() on all ranks" in alone
        assert shared.startswith("ValueError: shared_budget inside DistributedDataParallel")
        assert group.startswith("ValueError: process_group = ")
        assert "leave it out" in group
        assert uneven.startswith("RuntimeError: replicas differ: rank 1 has other chunks or steps")
