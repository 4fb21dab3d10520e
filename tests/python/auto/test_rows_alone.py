"""Plans and layers that send rows, in a group of one rank: what is no row of a table, and training by a plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from torchext import auto

WORDS = 40


@pytest.fixture(params=["dear"])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 4, **options), nn.Linear(4, 2))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
    model[1].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = embedding()
    model.get_submodule("0").weight.register_hook(lambda gradient: gradient)  # type: ignore[union-attr,operator]
    return model


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        (tied(), ValueError, "weight of '0' is shared with another layer"),
        (hooked(), ValueError, "weight of '0' has hooks"),
        (embedding(sparse=True), ValueError, "'0' has sparse=True"),
        (embedding(max_norm=1.0), ValueError, "'0' has max_norm=1.0"),
        (embedding(scale_grad_by_freq=True), ValueError, "'0' has scale_grad_by_freq=True"),
        (embedding().requires_grad_(False), ValueError, "weight of '0' is frozen"),
        (nn.Sequential(nn.EmbeddingBag(WORDS, 4), nn.Linear(4, 2)), TypeError, "'0' is EmbeddingBag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_row_of_a_table(group: None, model: nn.Module, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        auto.FactorLayers(model, ["0"], 8)


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_a_plan_of_one_rank_trains_as_without_it(group: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3))
    twin = copy.deepcopy(model)
    plan = auto.plan(model, lambda model: model(torch.ones(4, 16)).sum().backward())
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (model, twin)]
    ddp, sync = plan.apply(model, optimizers[0])
    for step in range(20):
        inputs = torch.rand(4, 16, generator=torch.Generator().manual_seed(step)) * 2 - 1
        for net, optimizer in zip((ddp, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (net(inputs) - inputs[:, :3].sin()).square().mean().backward()
            optimizer.step()
    sync.synchronize()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-6)
