"""Workers that are not at the same place: uneven inputs, a slow peer in front of a compiled model."""

from __future__ import annotations

import time

import torch
from attached import mlp, new_group
from harness import Rank, run_ranks
from rows import row
from torch.nn.parallel import DistributedDataParallel

import torchext


def check_join(rank: Rank, unused: bool) -> None:
    ddp = DistributedDataParallel(mlp(), process_group=new_group("prague"), find_unused_parameters=unused)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = torchext.attach(ddp, optimizer)
    steps = 0
    width = next(ddp.parameters()).shape[1]
    with ddp.join():
        for _ in range(3 + 2 * rank.rank):
            optimizer.zero_grad()
            ddp(torch.ones(2, width)).sum().backward()
            optimizer.step()
            steps += 1
    sync.detach()
    assert steps == 3 + 2 * rank.rank


def body_joins(rank: Rank) -> None:
    rank.init()
    for unused in (False, True):
        with row(f"find_unused_parameters={unused}"):
            check_join(rank, unused)


def test_uneven_inputs_with_prague() -> None:
    run_ranks(body_joins, 3)


def check_slow_peer(rank: Rank, backend: str) -> None:
    """Worker 1 takes its first step when worker 0 has been through the forward pass after its own."""
    ddp = DistributedDataParallel(torch.compile(mlp(), backend="eager"), process_group=new_group(backend, order="cta"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = torchext.attach(ddp, optimizer)
    inputs = torch.ones(2, next(ddp.parameters()).shape[1])
    through = rank.folder / f"through-{backend}"
    for step in range(3):
        end = time.monotonic() + 45  # it compiles first
        while rank.rank == 1 and step == 0 and not through.exists():
            assert time.monotonic() < end, "worker 0 waits in its forward pass"
            time.sleep(0.01)
        loss = ddp(inputs).sum()
        if rank.rank == 0 and step == 1:
            through.touch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sync.synchronize()
    sync.detach()


def body_slow_peer(rank: Rank) -> None:
    rank.init()
    for backend in ("prague", "dssync"):
        with row(backend):
            check_slow_peer(rank, backend)


def test_cta_hides_averages_under_the_forward_pass_of_a_compiled_model() -> None:
    run_ranks(body_slow_peer, 2, deadline=120)
