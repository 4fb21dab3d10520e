"""The end of a process that still has groups, while something else ends groups as well: nobody waits for a lock."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS
from harness import Rank
from rows import await_others, meet, run_rows
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize


class Stop(Exception):
    pass


def backward(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()


def begin(rank: Rank, backend: str) -> tuple[list[Any], DistributedDataParallel]:
    """A model is attached, and rank 1 has it until the others are done. Returns groups besides the first, and it."""
    options = {"allreduce_fallback": False} if backend == "dear" else {}
    rank.init(backend, pg_options=OPTIONS[backend](timeout=30.0, **options))
    others: list[Any] = [dist.new_group([0, 1], backend=backend) for _ in range(2)]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    torchext.attach(ddp, optimizer)
    for _ in range(5):
        backward(ddp)
        optimizer.step()
    # These wait for exchanges alone. Rank 1 does not come to this one: of gradients, of parameters.
    if rank.rank == 0 and backend in ("dear", "dssync"):
        backward(ddp)
        if backend == "dssync":
            optimizer.step()
    gc.collect()
    meet(rank, "trains")
    return others, ddp


def body_handler(rank: Rank, backend: str) -> float:
    others, _ddp = begin(rank, backend)
    if rank.rank == 1:
        await_others(rank)
        return 0.0
    start = time.monotonic()

    def handler(*_: Any) -> None:
        others.clear()  # groups that torch.distributed alone holds
        dist.destroy_process_group()
        raise Stop

    signal.signal(signal.SIGUSR1, handler)
    threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGUSR1)).start()
    with pytest.raises(Stop):
        torchext._C.leave_all("")
    assert not dist.is_initialized()
    return time.monotonic() - start


def body_thread(rank: Rank, backend: str) -> float:
    others, _ddp = begin(rank, backend)
    destroyed = rank.folder / "destroyed"
    if rank.rank == 1:
        while not destroyed.exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)  # the wait for rank 1 ends with it
    start = time.monotonic()

    def destroy() -> None:
        while others:
            dist.destroy_process_group(others.pop())
        destroyed.touch()

    threading.Timer(1.0, destroy).start()
    torchext._C.leave_all("")
    assert destroyed.exists()
    return time.monotonic() - start


def body_of(rank: Rank, body: Callable[[Rank, str], float], backend: str) -> float:
    return body(rank, backend)


# Each with a synchronizer of its own. That of dssync is prague's; with torchext plain DDP trains, and nobody waits.
QUICK = ("dear", "hop", "prague")


@pytest.mark.parametrize(
    "backends", [pytest.param(QUICK, id="quick"), pytest.param(("dssync",), id="dssync", marks=pytest.mark.slow)]
)
def test_groups_end_while_the_process_leaves(backends: Sequence[str]) -> None:
    rows = {f"{body.__name__[5:]}, {name}": (body, name) for body in (body_handler, body_thread) for name in backends}
    for name, outcomes in run_rows(body_of, 2, rows, victims={1}).items():
        assert outcomes[0].ok, (name, outcomes[0].trace)
        assert outcomes[0].value < 20, (name, outcomes[0])
        killed = name.startswith("thread")
        assert outcomes[1].message == ("exit code -9" if killed else ""), (name, outcomes[1])
