"""Directions on matrix tiles over several ranks: every strategy and every share is one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank
from largest import largest
from rows import values_in_one_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.optim import KFAC

WAYS = [("spd", True), ("spd", False), ("pad", None), ("mem-opt", None), ("comm-opt", True)]


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(50, 97), nn.Tanh(), nn.Linear(97, 64), nn.Tanh(), nn.Linear(64, 3))


def train(model: nn.Module, optimizer: KFAC, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def body(rank: Rank, shared: bool) -> dict[str, float]:
    options = {"lr": 0.05, "damping": 0.03, "inverse_update_steps": 2, "kl_clip": None}
    whole = [torch.randn(16 * rank.size, 50, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    mine = [batch.chunk(rank.size)[rank.rank] for batch in whole]
    alone = make()
    groups = [dist.new_group([r]) for r in range(rank.size)]
    train(alone, KFAC(alone, process_group=groups[rank.rank], **options), whole)
    expected = flat(alone)
    errors = {}
    for strategy, split in WAYS:
        model = DistributedDataParallel(make())
        optimizer = KFAC(model, strategy=strategy, split_directions=split, shared_memory=shared, **options)
        train(model, optimizer, mine)
        equal_everywhere(model.module)
        assert optimizer.plan().as_dict["tiles"] == _C.has_tiles()
        errors[f"{strategy} {split}"] = float((flat(model.module) - expected).abs().max() / expected.abs().max())
    return errors


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_way_is_one_process_with_the_whole_batch(size: int) -> None:
    cases = {"sockets": (body, False), "memory": (body, True)}
    for name, ranks in values_in_one_group(cases, size).items():
        for errors in ranks:
            assert largest(errors.values()) < 1e-5, (name, errors)
    if not _C.has_tiles():
        pytest.skip("no AMX here: these directions were made without tiles")
