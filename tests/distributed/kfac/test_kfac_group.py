"""The process group of K-FAC's own ends with it, at whatever moment that is on each rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, descriptor_count, run_ranks, thread_count
from torch import nn

from torchext.backends.new_groups import NAMED_BY_COUNTING
from torchext.errors import NoSupportedLayerError
from torchext.optim import SPDKFAC, KFACPreconditioner

pytestmark = [
    pytest.mark.sanitize,
    pytest.mark.skipif(NAMED_BY_COUNTING, reason="this torch names groups by how many there are"),
]


def comes(condition: Callable[[], bool]) -> bool:
    """Whether it comes true in a while; threads and connections end in the background."""
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


def stepped(seed: int, **options: Any) -> tuple[nn.Module, SPDKFAC]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = SPDKFAC(model, lr=0.01, inverse_update_steps=1, **options)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: SPDKFAC) -> None:
    model(torch.ones(3, 4, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def body_many(rank: Rank) -> bool:
    """Rank 1 collects what it no longer needs later than the others."""
    rank.init("gloo", timeout=30)
    gc.disable()
    dist.barrier()
    before = thread_count(), descriptor_count()
    groups = len(dist.distributed_c10d._world.pg_names)
    kept, trained = [], stepped(0)
    for number in range(8):
        model, optimizer = stepped(number)
        if number % 2:
            optimizer.kfac.remove()
        kept.append(optimizer)
        if rank.rank != 1 or number == 4:
            kept.clear()
        del model, optimizer
        step(*trained)
    plain = torch.optim.SGD(trained[0].parameters())
    KFACPreconditioner(trained[0], plain).remove()
    with pytest.raises(NoSupportedLayerError):
        SPDKFAC(nn.LayerNorm(3))
    subset = dist.new_group([0, 1], use_local_synchronization=True) if rank.rank < 2 else None
    if subset is not None:
        KFACPreconditioner(trained[0], process_group=subset)
        dist.barrier(subset)
        dist.destroy_process_group(subset)
    kept.clear()
    del trained, subset
    gc.collect()
    assert plain is not None  # a preconditioner that was removed goes before its optimizer
    assert len(dist.distributed_c10d._world.pg_names) == groups
    return comes(lambda: (thread_count(), descriptor_count()) <= before)


def test_groups_end_with_their_optimizers() -> None:
    assert run_ranks(body_many, 3) == [True] * 3


def body_timeout(rank: Rank) -> list[float]:
    """Rank 1 does not come to a step."""
    rank.init("gloo", timeout=20)
    beside = dist.new_group(timeout=timedelta(seconds=3))
    timeouts, optimizers = [], []
    for group in (None, beside):
        others = set(dist.distributed_c10d._world.pg_map)
        optimizers.append(SPDKFAC(nn.Linear(4, 2).double(), inverse_update_steps=1, process_group=group))
        (own,) = set(dist.distributed_c10d._world.pg_map) - others
        timeouts.append(own._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    store = dist.distributed_c10d._get_default_store()
    if rank.rank == 1:
        store.wait(["rank 0 has given up"], timedelta(seconds=30))
    else:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out|did not come within 3 s"):
            optimizers[1].step()
        store.set("rank 0 has given up", "")
    return timeouts


def test_it_waits_as_long_as_the_group_beside_it() -> None:
    assert run_ranks(body_timeout, 2) == [[20.0, 3.0]] * 2


def body_under_way(rank: Rank) -> bool:
    """Rank 0 lets go of an optimizer whose factors are on their way to ranks that send none."""
    rank.init("gloo", timeout=30)
    model, optimizer = stepped(0, shared_memory=False)
    for _ in range(4):
        step(model, optimizer)
    if rank.rank == 0:
        model(torch.ones(3, 4, dtype=torch.float64)).square().mean().backward()
        assert optimizer.stats()["runs"] > 5
        gone = optimizer.kfac.remove, optimizer.zero_grad
        del optimizer, gone
        gc.collect()
    dist.barrier()  # would not come before the group's timeout
    return True


def test_an_end_does_not_wait_for_what_is_on_its_way() -> None:
    assert run_ranks(body_under_way, 2) == [True, True]
