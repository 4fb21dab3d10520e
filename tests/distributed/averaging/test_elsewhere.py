"""A training thread that is elsewhere: in a barrier that no backend sees, in evaluation or saving on one rank."""

from __future__ import annotations

import io
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

STEPS = 8  # of an epoch


def barrier(rank: Rank, name: str) -> None:
    """Of files: what Ray Train's ``report()``, MPI or a store do comes to the same."""
    (rank.folder / f"{name}-{rank.rank}").touch()
    while not all((rank.folder / f"{name}-{other}").exists() for other in range(rank.size)):
        time.sleep(0.001)


class Training:
    """A small regression on one rank, attached."""

    def __init__(self, rank: Rank, backend: str, options: dict[str, Any]) -> None:
        kinds = {"prague": torchext.PragueOptions, "dssync": torchext.DSSyncOptions, "hop": torchext.HopOptions}
        kinds["dear"] = torchext.DeAROptions
        rank.init(backend, pg_options=kinds[backend](**options))
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sync = torchext.attach(self.model, self.optimizer)
        self._data = torch.Generator().manual_seed(rank.rank)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 8, generator=self._data)).square().mean().backward()
        self.optimizer.step()


def trained(rank: Rank, backend: str, options: dict[str, Any]) -> tuple[Any, Any]:
    training = Training(rank, backend, options)
    return training.step, training.sync


def body_epochs(rank: Rank, backend: str, options: dict[str, Any], epochs: int) -> int:
    step, sync = trained(rank, backend, options)
    pauses = random.Random(rank.rank)
    for epoch in range(epochs):
        for _ in range(STEPS):
            if pauses.random() < 0.2:
                time.sleep(pauses.uniform(0.0, 0.1))
            step()
        barrier(rank, f"epoch{epoch}")
    with sync.averaged() as module:
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        assert flat.isfinite().all()
        first = flat.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, flat)
    sync.detach()
    return int(sync.stats()["steps"])


CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("prague", {"generator": generator, "order": order})
        for generator in ("smart", "random", "static")
        for order in ("cta", "atc")
    ),
    ("dssync", {}),
    ("hop", {}),
    ("dear", {}),
]


@pytest.mark.parametrize(("backend", "options"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("size", [2, 3])
def test_a_barrier_that_no_backend_sees(backend: str, options: dict[str, Any], size: int) -> None:
    assert run_ranks(body_epochs, size, backend, options, 6, deadline=120) == [6 * STEPS] * size


def body_one_evaluates(rank: Rank, options: dict[str, Any]) -> tuple[int, int]:
    """Rank 0 leaves for a time after a step; the others train on, and it comes back to the groups."""
    step, sync = trained(rank, "prague", options)
    for _ in range(10):
        step()
    if rank.rank == 0:
        others = [rank.folder / f"on-{other}" for other in range(1, rank.size)]
        while not all(path.exists() for path in others):  # for as long as that takes them
            time.sleep(0.01)
    else:
        for _ in range(40):
            step()
        (rank.folder / f"on-{rank.rank}").touch()
    before = sync.stats()["averages"]
    barrier(rank, "back")
    for _ in range(40):
        step()
    after = sync.stats()["averages"]
    with sync.averaged():
        pass
    sync.detach()
    return before, after


@pytest.mark.parametrize("generator", ["smart", "random"])
@pytest.mark.parametrize("order", ["cta", "atc"])
def test_others_train_on_while_one_is_elsewhere(generator: str, order: str) -> None:
    counts = run_ranks(body_one_evaluates, 4, {"generator": generator, "order": order}, deadline=120)
    assert all(after > before for before, after in counts), counts


def body_one_saves(rank: Rank, backend: str, options: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Rank 0 evaluates and saves alone, for longer than a heartbeat may be missing; the others go on."""
    training = Training(rank, backend, {**options, "heartbeat_timeout": timedelta(seconds=1)})
    for epoch in range(2):
        for _ in range(STEPS):
            training.step()
        if rank.rank == 0:
            module = training.model.module
            module.eval()
            with torch.no_grad():
                assert module(torch.ones(2, 8)).isfinite().all()
            module.train()
            torch.save([training.model.state_dict(), training.optimizer.state_dict()], io.BytesIO())
            time.sleep(2.5 if epoch == 0 else 0.0)
    with training.sync.averaged() as module:
        end = {name: value.detach().clone() for name, value in module.named_parameters()}
    failure = torchext.backend_of().failure
    training.sync.detach()
    return failure, end


ALONE = [
    ("prague", {}),
    ("prague", {"generator": "static"}),
    ("dssync", {}),
    ("hop", {}),
    ("hop", {"max_iteration_gap": 2, "backup_workers": 1}),
    ("dear", {}),
    ("dear", {"allreduce_fallback": False, "bucket_mb": 0.001}),
]


@pytest.mark.filterwarnings("ignore::torchext.errors.ReplicaWarning")
@pytest.mark.parametrize(("backend", "options"), ALONE, ids=lambda value: str(value))
def test_one_evaluates_and_saves_alone(backend: str, options: dict[str, Any]) -> None:
    ends = run_ranks(body_one_saves, 3, backend, options, deadline=120)
    for failure, end in ends:
        assert not failure[1], failure
        assert all(torch.equal(value, ends[0][1][name]) for name, value in end.items())
