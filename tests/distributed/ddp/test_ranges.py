"""Timeouts at the end of what clocks hold, and a default device that is not the CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attached import OPTIONS, at_once, mlp
from elastic_training import ElasticTraining
from harness import Rank, run_ranks
from rows import row_values
from torch.nn.parallel import DistributedDataParallel

import torchext


def body_long_timeouts(rank: Rank, backend: str) -> Any:
    years = timedelta(days=3650)
    rank.init(backend, pg_options=at_once(backend, timeout=years), timeout=years.total_seconds())
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = torchext.attach(ddp, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    sync.synchronize()
    total = torch.ones(1)
    dist.all_reduce(total)
    sync.detach()
    return total.item()


def test_ten_years_are_no_timeout() -> None:
    for backend, totals in row_values(body_long_timeouts, 2, {backend: (backend,) for backend in OPTIONS}).items():
        assert totals == [2.0, 2.0], backend


def body_default_device(rank: Rank) -> Any:
    training = ElasticTraining(rank, "prague", {}, workers=2)
    torch.set_default_device("meta")
    step = training.train

    def on_cpu(steps: int) -> None:
        with torch.device("cpu"):  # the script's own tensors
            step(steps)

    training.train = on_cpu  # type: ignore[method-assign]
    training.grow_to(3)
    training.train(2)
    with training.sync.averaged():
        pass
    training.sync.detach()
    torch.set_default_device(None)
    return training.sync.stats()["workers"]


def test_a_default_device_is_the_scripts() -> None:
    """Averages with ``on_peer_failure="continue"``, and a newcomer that is let in."""
    assert run_ranks(body_default_device, 3, deadline=150) == [3, 3, 3]
