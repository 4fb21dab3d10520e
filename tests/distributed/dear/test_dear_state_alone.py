"""``optimizer.state_dict()`` on rank 0 alone, as most loops save: with "dear" it works, or ends all ranks at once."""

from __future__ import annotations

import copy
import io
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import batch, mlp
from harness import Rank, launch, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

# Far beyond the test's own deadline: nothing here may be ended by it.
TIMEOUT = 300.0


class Run:
    """A small regression with Adam on one rank."""

    def __init__(self, rank: Rank, options: dict[str, Any]) -> None:
        self.rank = rank.rank
        timeout = timedelta(seconds=TIMEOUT)
        self.group = dist.new_group(
            backend="dear", timeout=timeout, pg_options=torchext.DeAROptions(**options) if options else None
        )
        self.ddp = DistributedDataParallel(mlp(), process_group=self.group)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.sync = torchext.attach(self.ddp, self.optimizer)
        self.steps = 0

    def backward(self) -> None:
        inputs, targets = batch(self.rank, self.steps)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.ddp(inputs), targets).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.steps += 1


OPTIONS: list[dict[str, Any]] = [
    {},
    {"allreduce_fallback": False, "bucket_mb": 0.001},
    {"form": "replicated", "transport": "collectives"},
]


def body_saves(rank: Rank) -> None:
    rank.init("dear", timeout=TIMEOUT)
    for options in OPTIONS:
        try:
            save(rank, options)
        except BaseException as error:
            error.add_note(f"with {options}")
            raise


def save(rank: Rank, options: dict[str, Any]) -> None:
    """Saves in the middle of training, and goes on; a second run loads the file and is where the first is."""
    run = Run(rank, options)
    file = io.BytesIO()
    for _ in range(8):
        run.step()
        if rank.rank == 0 and run.steps in (1, 5):
            file = io.BytesIO()
            torch.save({"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
    run.sync.synchronize()
    end = copy.deepcopy(run.ddp.module.state_dict())
    run.sync.detach()

    saved: list[Any] = [file.getvalue()]
    dist.broadcast_object_list(saved)
    state = torch.load(io.BytesIO(saved[0]))
    module = mlp()
    module.load_state_dict(state["model"])
    run.ddp = DistributedDataParallel(module, process_group=run.group)
    run.optimizer = torch.optim.AdamW(run.ddp.parameters(), lr=0.01)
    run.sync = torchext.attach(run.ddp, run.optimizer)
    run.optimizer.load_state_dict(state["optimizer"])
    run.steps = 5
    for _ in range(3):
        run.step()
    run.sync.synchronize()
    torch.testing.assert_close(module.state_dict(), end, rtol=1e-5, atol=1e-6)


def test_rank_0_saves_alone() -> None:
    run_ranks(body_saves, 3)


def body_sharded(rank: Rank) -> dict[str, Any]:
    rank.init("dear", timeout=TIMEOUT)
    return {f"{bucket_mb} MiB": failure_in_slices(rank, bucket_mb) for bucket_mb in (0.001, 4.0)}


def failure_in_slices(rank: Rank, bucket_mb: float) -> Any:
    run = Run(rank, {"form": "sharded", "allreduce_fallback": False, "bucket_mb": bucket_mb})
    for _ in range(2):
        run.step()
    try:
        if rank.rank == 0:
            run.optimizer.state_dict()
        for _ in range(3):
            run.step()
    except dist.DistBackendError as error:
        return str(error), torchext.backend_of(run.group).failure
    return None


def test_all_ranks_know_why_it_does_not_work_in_slices() -> None:
    for found in run_ranks(body_sharded, 3, deadline=30):
        for where, ended in found.items():
            assert ended is not None, where
            text, failure = ended
            assert "rank 0 waits in optimizer.state_dict()" in text and "form='replicated'" in text, (where, text)
            assert failure[0] == 0 and "on all ranks" in failure[1], (where, failure)


def body_together(rank: Rank) -> None:
    """All ranks, but at different moments; with gradients that no step has used; with steps counted anew."""
    rank.init("dear", timeout=TIMEOUT)
    run = Run(rank, {"form": "sharded", "allreduce_fallback": False, "bucket_mb": 0.001})
    for steps in range(3):
        run.step()
        if rank.rank == 1:
            rank.report(f"slow {steps}")
            rank.pause()
        run.optimizer.state_dict()
    run.backward()
    assert run.optimizer.state_dict()["state"][0]["step"] == 3
    run.optimizer.step()
    run.sync.load_state_dict({**run.sync.state_dict(), "steps": 0})
    run.step()
    assert run.optimizer.state_dict()["state"][0]["step"] == 5
    run.sync.detach()


def test_ranks_that_come_late_are_waited_for() -> None:
    with launch(body_together, 2) as ranks:
        for steps in range(3):
            ranks.expect(f"slow {steps}", [1])
            ranks.proceed([1])
        ranks.values(deadline=60)
