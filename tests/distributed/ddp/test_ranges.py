"""Values at the ends of what counters and clocks hold, and a default device that is not the CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS, mlp
from elastic_training import ElasticTraining
from harness import Rank, run_ranks
from torch.nn.parallel import DistributedDataParallel

import torchext

TOO_LONG = [timedelta.max, timedelta(days=365 * 300), timedelta(days=3651)]


@pytest.mark.parametrize("value", TOO_LONG, ids=str)
@pytest.mark.parametrize("name", ["timeout", "heartbeat_timeout", "operation_timeout"])
@pytest.mark.parametrize("backend", sorted(OPTIONS))
def test_centuries_are_refused(backend: str, name: str, value: timedelta) -> None:
    with pytest.raises(ValueError, match=name):
        OPTIONS[backend](**{name: value})


def body_long_timeouts(rank: Rank, backend: str) -> Any:
    for value in TOO_LONG:
        with pytest.raises(ValueError, match=r"timeout of a \w+ group must be more than 0 and at most 3650 days"):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=value)
    years = timedelta(days=3650)
    rank.init(backend, pg_options=OPTIONS[backend](timeout=years), timeout=years.total_seconds())
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
    for steps in (2**62 + 1, 2**63 - 1, 2**63, 2**64, -1):
        with pytest.raises(ValueError, match=r"steps must be an int in \[0, 2\*\*62\]"):
            sync.load_state_dict({"version": 1, "steps": steps})
    sync.detach()
    return total.item()


@pytest.mark.parametrize("backend", sorted(OPTIONS))
def test_ten_years_are_no_timeout(backend: str) -> None:
    assert run_ranks(body_long_timeouts, 2, backend, deadline=150) == [2.0, 2.0]


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
