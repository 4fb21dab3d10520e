"""Models of the backends that average, in a group of one rank: what attach, steps and ``averaged()`` do in Python."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.errors import ReplicaWarning


def begin(backend: str) -> None:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


@pytest.fixture(params=["prague", "dssync", "hop"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    begin(request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def prague() -> Iterator[None]:
    begin("prague")
    yield
    dist.destroy_process_group()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs)))  # type: ignore[no-any-return]


class Training:
    """A small regression, attached."""

    def __init__(
        self,
        module: nn.Module | None = None,
        kind: Any = torch.optim.SGD,
        ddp: dict[str, Any] | None = None,
        **attach: Any,
    ) -> None:
        self.module: Any = Regression() if module is None else module
        self.ddp = DistributedDataParallel(self.module, **(ddp or {}))
        self.optimizer = kind(self.ddp.parameters(), lr=0.05)
        self.sync = torchext.attach(self.ddp, self.optimizer, **attach)

    def loss(self) -> torch.Tensor:
        inputs = torch.rand(16, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return nn.functional.mse_loss(self.ddp(inputs), inputs[:, :4].sum(1, keepdim=True))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def test_a_world_of_one_trains(prague: None) -> None:
    training = Training()
    with training.sync.averaged():
        before = training.loss().item()
    for _ in range(20):
        training.step()
    with training.sync.averaged():
        assert training.loss().item() < before
    training.sync.synchronize()
    stats = training.sync.stats()
    training.sync.detach()
    assert stats["steps"] == 20 and stats["averages"] == 0 and stats["bytes_sent"] == 0


# ---- Memory that is averaged ----


def test_buffers_that_cannot_be_averaged_are_named(backend: str) -> None:
    module = Regression()
    module.register_buffer("odd", torch.ones(8, 16)[:, :8])
    ddp = DistributedDataParallel(module, broadcast_buffers=False, init_sync=False)
    with pytest.raises(TypeError, match=r"buffer 'odd' has strides \(16, 1\)"):
        torchext.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))


def test_memory_that_the_model_no_longer_has_is_not_averaged(backend: str) -> None:
    training = Training()
    training.step()
    training.sync.synchronize()
    training.module.double()
    training.module.seen = training.module.seen.float()
    for call in (training.sync.synchronize, training.sync.averaged().__enter__):
        with pytest.raises(RuntimeError, match=r"parameter or buffer 0 .* has been given other memory"):
            call()


def test_a_buffer_that_is_assigned_anew_keeps_its_shape(backend: str) -> None:
    training = Training()
    training.step()
    training.sync.synchronize()
    for call in (training.sync.synchronize, training.sync.averaged().__enter__, training.step):
        training.module.seen = torch.zeros(4)
        with pytest.raises(RuntimeError, match=r"buffer seen has been given other memory since torchext.attach"):
            call()
    training.module.seen = torch.ones(3)
    training.sync.synchronize()
    assert torch.equal(training.module.seen, torch.ones(3))
    training.sync.detach()


# ---- Frozen parameters ----


@pytest.mark.parametrize("name", ["prague", "dssync", "hop", "dear"])
def test_unfreezing_after_attach(name: str) -> None:
    begin(name)
    try:
        module = Regression()
        module.body.requires_grad_(False)
        training = Training(module, ddp={"find_unused_parameters": True})
        training.step()
        training.sync.wait()
        for frozen in (True, False):  # what was trained at attach may pause
            module.head.bias.requires_grad_(not frozen)
            training.step()
        training.sync.wait()
        module.body.weight.requires_grad_(True)
        text = "body.weight was frozen at torchext.attach and requires a gradient now"
        with pytest.raises(ValueError, match=text):
            training.step()
        module.body.weight.requires_grad_(False)
        training.sync.detach()
    finally:
        dist.destroy_process_group()


# ---- averaged() and state_dict() ----


@pytest.mark.filterwarnings("ignore::torchext.errors.ReplicaWarning")
def test_an_error_ends_the_block(backend: str) -> None:
    """And what was loaded inside is gone with it."""
    training = Training(kind=torch.optim.AdamW)
    with training.sync.averaged():  # before there is any state
        assert not training.optimizer.state
    assert not training.optimizer.state
    for _ in range(3):
        training.step()
    own = copy.deepcopy(training.optimizer.state_dict())
    zeros = {k: {n: v * 0 for n, v in s.items()} for k, s in own["state"].items()}

    def load_and_fail() -> None:
        training.optimizer.load_state_dict({**own, "state": zeros})
        raise KeyError

    with pytest.raises(KeyError), training.sync.averaged():
        load_and_fail()
    torch.testing.assert_close(training.optimizer.state_dict()["state"], own["state"], rtol=0, atol=0)


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_a_replica_is_not_saved_without_a_word(backend: str, whose: str) -> None:
    training = Training(kind=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9))
    ddp, optimizer, sync = training.ddp, training.optimizer, training.sync

    def told(of: Any) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            of.state_dict()
            copy.deepcopy(ddp.module).state_dict()
        return sum(issubclass(w.category, ReplicaWarning) for w in caught)

    assert told(ddp) == 0  # nobody has made a step
    training.step()
    with sync.averaged() as module:
        assert told(module) == told(optimizer) == 0
    sync.synchronize()
    assert told(ddp) == told(optimizer) == 0
    training.step()
    assert told(optimizer if whose == "optimizer" else ddp) == 1
    assert told(ddp) == told(optimizer) == 0  # once
    sync.synchronize()
    sync.detach()

    other = torchext.attach(DistributedDataParallel(ddp.module), optimizer)
    training.step()
    other.detach()
    assert told(ddp) == told(optimizer) == 0  # as with any model


# ---- on_peer_failure="continue" ----


def test_only_one_model_may_renew_the_default_group(prague: None) -> None:
    refused = pytest.raises(ValueError, match="Several models can train on if each has a group of its own")

    def attached(group: dist.ProcessGroup | None, on_peer_failure: str = "continue") -> Training:
        return Training(ddp={"process_group": group}, on_peer_failure=on_peer_failure)

    first = attached(None)
    for on_peer_failure in ("raise", "continue"):
        with refused:
            attached(dist.new_group(backend="prague"), on_peer_failure)
    first.sync.detach()
    kept = attached(dist.new_group(backend="prague"))
    also_kept = attached(None, "raise")  # ends with the job, as it says
    with refused:
        attached(None)
    del kept, also_kept  # in cycles, not detached
    attached(None)
    dist.destroy_process_group()
    begin("prague")
    attached(None)
