"""The backend ``torchext`` in one process: its name, what it says, and the profile of a script's own steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import auto


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("torchext", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        hidden = self.first(inputs)
        time.sleep(0.02)
        return self.second(hidden)


def train(ddp: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.ones(3, 4)).sum().backward()
        optimizer.step()


def attached() -> tuple[Any, torch.optim.Optimizer, auto.AutoSynchronizer]:
    ddp = DistributedDataParallel(Slow())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = torchext.attach(ddp, optimizer)
    assert isinstance(sync, auto.AutoSynchronizer)
    return ddp, optimizer, sync


def test_name_is_what_the_user_typed(group: None) -> None:
    assert dist.get_backend() == "torchext"
    assert torchext.backend_of().name() == "torchext"
    assert isinstance(torchext.backend_of(), torchext.ProcessGroupDear)


def test_one_rank_has_nothing_to_synchronise(group: None) -> None:
    ddp, optimizer, sync = attached()
    assert sync.explain() == "not decided yet: 0 of 8 steps"
    train(ddp, optimizer, 8)
    assert (sync.plan, sync.explain()) == (None, "not decided yet: 8 of 8 steps")
    train(ddp, optimizer, 1)
    assert sync.plan is not None
    assert sync.explain() == sync.plan.explain() == "1 rank: nothing to synchronise"
    assert sync.stats() == {"steps": 9, "mode": "allreduce", "decided": True}


def test_profile_is_that_of_the_scripts_own_steps(group: None) -> None:
    ddp, optimizer, sync = attached()
    train(ddp, optimizer, 9)
    assert sync.plan is not None
    profile = sync.plan.profile
    assert [p.name for p in profile.parameters][-2:] in (["first.weight", "first.bias"], ["first.bias", "first.weight"])
    assert {p.name: p.first_use for p in profile.parameters}["second.weight"] == 2
    before, first, _ = profile.forward_seconds
    assert before >= 0.009
    assert first >= 0.019
    assert len(profile.step_seconds[0]) == 5
    assert min(profile.step_seconds[0]) >= 0.03
    assert profile.backward_seconds >= max(p.ready_seconds for p in profile.parameters) > 0


def test_nothing_of_the_measurement_is_left(group: None) -> None:
    ddp, optimizer, sync = attached()
    hooks = [len(module._forward_pre_hooks) for module in ddp.modules()]
    train(ddp, optimizer, 5)
    assert [len(module._forward_pre_hooks) for module in ddp.modules()] != hooks
    train(ddp, optimizer, 5)
    assert not any(len(module._forward_pre_hooks) for module in ddp.modules())
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in ddp.parameters())
    assert sync.stats()["decided"]


def test_evaluation_and_passes_of_one_step_count_for_nothing(group: None) -> None:
    ddp, optimizer, sync = attached()
    for _ in range(12):
        ddp(torch.ones(3, 4))  # no step follows
    with torch.no_grad():
        ddp(torch.ones(3, 4))
    ddp.eval()
    ddp(torch.ones(3, 4))
    ddp.train()
    assert sync.explain() == "not decided yet: 0 of 8 steps"
    train(ddp, optimizer, 2)
    assert sync.explain() == "not decided yet: 2 of 8 steps"


def test_steps_without_gradients_leave_plain_ddp(group: None) -> None:
    ddp, optimizer, sync = attached()
    for _ in range(10):
        ddp(torch.ones(3, 4))
        optimizer.step()
    assert (sync.plan, sync.explain()) == (None, "plain DDP: a measured step left no gradients")
