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
from torch.utils.checkpoint import checkpoint

import torchext
from torchext import auto
from torchext.errors import BackendOptionsError


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


@pytest.mark.parametrize("options", [torchext.PragueOptions(), {"form": "sharded"}], ids=["prague's", "dict"])
def test_options_of_another_kind_are_refused(options: Any) -> None:
    with pytest.raises(BackendOptionsError, match=r"pg_options for backend 'torchext' is .*DeAROptions"):
        dist.init_process_group("torchext", store=HashStore(), rank=0, world_size=1, pg_options=options)
    assert not dist.is_initialized()


def test_a_model_without_trained_parameters_is_refused_by_ddp(group: None) -> None:
    with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed"):
        DistributedDataParallel(Slow().requires_grad_(False))


def test_one_rank_has_nothing_to_synchronise(group: None) -> None:
    ddp, optimizer, sync = attached()
    assert sync.explain() == "not decided yet: 0 of 8 steps"
    train(ddp, optimizer, 7)
    assert (sync.plan, sync.explain()) == (None, "not decided yet: 7 of 8 steps")
    train(ddp, optimizer, 1)
    assert sync.plan is not None
    assert sync.explain() == sync.plan.explain() == "1 rank: nothing to synchronise"
    assert sync.stats() == {"steps": 8, "mode": "allreduce", "decided": True}


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


def test_only_passes_that_ddp_averages_count(group: None) -> None:
    ddp, optimizer, sync = attached()
    inputs = torch.ones(3, 4)
    with torch.no_grad():
        ddp(inputs)
    with ddp.no_sync():
        ddp(inputs).sum().backward()
    ddp.module(inputs).sum().backward()
    for _ in range(12):
        ddp(inputs)  # no backward pass follows
        optimizer.step()
    torch.autograd.grad(ddp(inputs).sum(), list(ddp.parameters()))  # which DDP does not see
    assert sync.explain() == "not decided yet: 0 of 8 steps"
    train(ddp, optimizer, 2)
    assert sync.explain() == "not decided yet: 2 of 8 steps"
    output = ddp(inputs).sum()
    output.backward(retain_graph=True)
    output.backward()  # which DDP leaves to the script
    assert sync.explain() == "not decided yet: 3 of 8 steps"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        return [head(inputs).sum() for head in self.heads]


def test_a_pass_in_parts_counts_when_ddp_is_done(group: None) -> None:
    ddp = DistributedDataParallel(Heads())
    sync = torchext.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    first, second = ddp(torch.ones(3, 4))
    first.backward()
    assert sync.explain() == "not decided yet: 0 of 8 steps"
    second.backward()
    assert sync.explain() == "not decided yet: 1 of 8 steps"


class Checkpointed(Slow):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=True)
        return checkpoint(self.second, hidden, use_reentrant=True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Slow, {}),
        (Slow, {"find_unused_parameters": True}),
        (Slow, {"static_graph": True}),
        (Checkpointed, {}),
        (Checkpointed, {"static_graph": True}),
    ],
)
def test_passes_of_every_kind_of_model_count(group: None, kind: type[nn.Module], options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(kind(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = torchext.attach(ddp, optimizer)
    for steps in range(1, 4):
        train(ddp, optimizer, 1)
        assert sync.explain() == f"not decided yet: {steps} of 8 steps"


def test_the_wrapper_may_stay_in_evaluation_mode(group: None) -> None:
    ddp, optimizer, sync = attached()
    ddp.eval()
    ddp.module.train()  # as frameworks do
    train(ddp, optimizer, 8)
    assert sync.stats()["decided"]
