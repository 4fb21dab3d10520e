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
from attached import ORDERS, new_group
from harness import Rank, run_ranks
from rows import row
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

STEPS = 8  # of an epoch
EPOCHS = 6


def barrier(rank: Rank, name: str) -> None:
    """Of files: what Ray Train's ``report()``, MPI or a store do comes to the same."""
    (rank.folder / f"{name}-{rank.rank}").touch()
    while not all((rank.folder / f"{name}-{other}").exists() for other in range(rank.size)):
        time.sleep(0.001)


class Training:
    """A small regression on one rank, attached."""

    def __init__(self, rank: Rank, backend: str, options: dict[str, Any]) -> None:
        self.group = new_group(backend, **options)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.model = DistributedDataParallel(module, process_group=self.group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sync = torchext.attach(self.model, self.optimizer)
        self._data = torch.Generator().manual_seed(rank.rank)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 8, generator=self._data)).square().mean().backward()
        self.optimizer.step()

    def end(self) -> None:
        self.sync.detach()
        dist.destroy_process_group(self.group)


def same_everywhere(module: nn.Module, backend: str) -> None:
    # Of buffers dear does what DDP does: rank 0's count, and the others get them in the next forward pass.
    buffers = [] if backend == "dear" else [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in (*module.parameters(), *buffers)])
    assert flat.isfinite().all()
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, flat)


def check_epochs(rank: Rank, name: str, backend: str, options: dict[str, Any]) -> None:
    training = Training(rank, backend, options)
    pauses = random.Random(rank.rank)
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            if pauses.random() < 0.2:
                time.sleep(pauses.uniform(0.0, 0.1))
            training.step()
        barrier(rank, f"{name}-epoch{epoch}")
    with training.sync.averaged() as module:
        same_everywhere(module, backend)
    training.end()
    assert training.sync.stats()["steps"] == EPOCHS * STEPS


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


def body_epochs(rank: Rank) -> None:
    rank.init()
    for number, (backend, options) in enumerate(CASES):
        with row(backend, options):
            check_epochs(rank, f"row{number}", backend, options)


@pytest.mark.parametrize("size", [2, 3])
def test_a_barrier_that_no_backend_sees(size: int) -> None:
    run_ranks(body_epochs, size, deadline=180)


def check_one_evaluates(rank: Rank, generator: str, order: str) -> None:
    """Rank 0 leaves for a time after a step; the others train on, and it comes back to the groups."""
    name = f"{generator}-{order}"
    training = Training(rank, "prague", {"generator": generator, "order": order})
    for _ in range(10):
        training.step()
    if rank.rank == 0:
        others = [rank.folder / f"{name}-on-{other}" for other in range(1, rank.size)]
        while not all(path.exists() for path in others):  # for as long as that takes them
            time.sleep(0.01)
    else:
        for _ in range(40):
            training.step()
        (rank.folder / f"{name}-on-{rank.rank}").touch()
    before = training.sync.stats()["averages"]
    barrier(rank, f"{name}-back")
    for _ in range(40):
        training.step()
    after = training.sync.stats()["averages"]
    with training.sync.averaged():
        pass
    training.end()
    assert after > before, (before, after)


def body_one_evaluates(rank: Rank) -> None:
    rank.init()
    for generator in ("smart", "random"):
        for order in ORDERS:
            with row(generator, order):
                check_one_evaluates(rank, generator, order)


def test_others_train_on_while_one_is_elsewhere() -> None:
    run_ranks(body_one_evaluates, 4, deadline=120)


def check_one_saves(rank: Rank, backend: str, options: dict[str, Any]) -> None:
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
        same_everywhere(module, backend)
    failure = torchext.backend_of(training.group).failure
    training.end()
    assert not failure[1], failure


ALONE: list[tuple[str, dict[str, Any]]] = [
    ("prague", {}),
    ("prague", {"generator": "static"}),
    ("dssync", {}),
    ("hop", {}),
    ("hop", {"max_iteration_gap": 2, "backup_workers": 1}),
    ("dear", {}),
    ("dear", {"allreduce_fallback": False, "bucket_mb": 0.001}),
]


def body_one_saves(rank: Rank) -> None:
    rank.init()
    for backend, options in ALONE:
        with row(backend, options):
            check_one_saves(rank, backend, options)


def test_one_evaluates_and_saves_alone() -> None:
    run_ranks(body_one_saves, 3, deadline=180)
