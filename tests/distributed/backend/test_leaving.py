"""The end of a process that still has groups, while something else ends groups as well: nobody waits for a lock."""

from __future__ import annotations

import gc
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS
from case_choice import quick_on
from harness import Rank, launch
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize


class Stop(Exception):
    pass


def train(steps: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    torchext.attach(ddp, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def begin(rank: Rank, backend: str) -> list[Any]:
    """A model is attached, and rank 1 trains on for as long as the test likes. Returns the groups besides the first."""
    rank.init(backend, pg_options=OPTIONS[backend](timeout=30.0))
    others: list[Any] = [dist.new_group([0, 1], backend=backend) for _ in range(2)]
    train(5)
    gc.collect()
    if rank.rank == 1:
        rank.report("trains")
        rank.pause()
    return others


def body_handler(rank: Rank, backend: str) -> float:
    others = begin(rank, backend)
    start = time.monotonic()

    def handler(*_: Any) -> None:
        others.clear()  # groups that torch.distributed alone holds
        dist.destroy_process_group()
        raise Stop

    signal.signal(signal.SIGUSR1, handler)
    threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGUSR1)).start()
    try:
        torchext._C.leave_all("")
        time.sleep(2)  # nobody was waited for
    except Stop:
        pass
    return time.monotonic() - start


def body_thread(rank: Rank, backend: str) -> float:
    others = begin(rank, backend)
    start = time.monotonic()
    destroyed = threading.Event()

    def destroy() -> None:
        while others:
            dist.destroy_process_group(others.pop())
        destroyed.set()

    threading.Timer(1.0, destroy).start()
    rank.report("leaves")
    torchext._C.leave_all("")
    assert destroyed.wait(30)
    return time.monotonic() - start


@pytest.mark.parametrize("body", [body_handler, body_thread])
@pytest.mark.parametrize("backend", quick_on("dear", "hop", "prague"))
def test_groups_end_while_the_process_leaves(backend: str, body: Any) -> None:
    with launch(body, 2, backend) as ranks:
        ranks.expect("trains", [1])
        if body is body_thread:  # the wait for rank 1 ends with it
            ranks.expect("leaves", [0])
            time.sleep(2)
            ranks.kill(1)
        outcome = ranks.outcomes([0])[0]
    assert outcome.ok, outcome.trace or outcome
    assert outcome.value < 20
