"""fault_acts holds what every rank does in a fault of fault_table.py: how it makes its group, and what it calls then.

Ranks are processes of tests/distributed/harness.py; rank 1 is the one at fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Rank, descriptor_count, thread_count
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

VICTIM = 1
TIMEOUT_S = 12.0
LOOP_S = 5.0
GROUPS = 20
_CLONE_NEWNET = 0x40000000
_FORK_LIMIT_S = 15.0
_OPTIONS = {
    "prague": torchext.PragueOptions,
    "hop": torchext.HopOptions,
    "dssync": torchext.DSSyncOptions,
    "dear": torchext.DeAROptions,
}

Options = Mapping[str, Any]  # of the backends of torchext
# What came of it, and when, if that is not now.
Saw = str | tuple[str, float]


# ---- How ranks make their group ----


def join(rank: Rank, backend: str, options: Options, _: Any = None, **kwargs: Any) -> None:
    limit = timedelta(seconds=TIMEOUT_S)
    pg_options = None if backend == "gloo" else _OPTIONS[backend](timeout=limit, **options)
    rank.init(backend, timeout=TIMEOUT_S, pg_options=pg_options, **kwargs)
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    dist.barrier()


def join_by_server(rank: Rank, backend: str, options: Options, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, rank.size, False, timedelta(seconds=TIMEOUT_S))
    limit = timedelta(seconds=TIMEOUT_S)
    pg_options = None if backend == "gloo" else _OPTIONS[backend](timeout=limit, **options)
    dist.init_process_group(
        backend, store=store, rank=rank.rank, world_size=rank.size, timeout=limit, pg_options=pg_options
    )
    dist.barrier()


def join_on_hosts(rank: Rank, backend: str, options: Options, namespaces: list[str]) -> None:
    with Path("/run/netns", namespaces[rank.rank]).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    join(rank, backend, options)


# ---- What ranks do ----


def _returned(tensor: torch.Tensor) -> str:
    return f"returned {tensor[0].item():g}"


def loop(*_: Any) -> Saw:
    """Until an error; or some seconds, which all ranks end in one round."""
    end = time.monotonic() + LOOP_S
    more = torch.ones(1)
    while more.item():
        dist.all_reduce(torch.ones(100_000))
        dist.all_reduce(more.fill_(time.monotonic() < end), op=dist.ReduceOp.MIN)
    return "went on"


def loop_for_ever(*_: Any) -> Saw:
    while True:
        dist.all_reduce(torch.ones(100_000))


@dataclass(frozen=True)
class ReduceButFor:
    absent: int
    abort: bool = False

    def __call__(self, rank: Rank, *_: Any) -> Saw:
        if rank.rank == self.absent:
            rank.pause()
        if self.abort and rank.rank == VICTIM:
            threading.Timer(0.5, dist.group.WORLD._get_backend(torch.device("cpu")).abort).start()
        dist.all_reduce(ten := torch.ones(10))
        return _returned(ten)


def numel(rank: Rank, *_: Any) -> Saw:
    dist.all_reduce(some := torch.ones(12 if rank.rank == VICTIM else 10))
    return _returned(some)


def dtype(rank: Rank, *_: Any) -> Saw:
    dist.all_reduce(ten := torch.ones(10, dtype=torch.int32 if rank.rank == VICTIM else torch.float32))
    return _returned(ten)


def reduction(rank: Rank, *_: Any) -> Saw:
    dist.all_reduce(ten := torch.ones(10), op=dist.ReduceOp.MAX if rank.rank == VICTIM else dist.ReduceOp.SUM)
    return _returned(ten)


def root(rank: Rank, *_: Any) -> Saw:
    dist.broadcast(ten := torch.full((10,), float(rank.rank)), src=1 if rank.rank == VICTIM else 0)
    return _returned(ten)


def order(rank: Rank, *_: Any) -> Saw:
    first, second = torch.ones(10), torch.full((10,), 2.0)
    if rank.rank == VICTIM:
        dist.all_reduce(second)
        dist.all_reduce(first)
    else:
        dist.all_reduce(first)
        dist.all_reduce(second)
    return f"{_returned(first)} and {second[0].item():g}"


def destroy(rank: Rank, *_: Any) -> Saw:
    if rank.rank == 0:
        rank.pause()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    dist.destroy_process_group()
    del work
    return "destroyed"


def never_join(rank: Rank, backend: str, options: Options, _: Any) -> Saw:
    if rank.rank == VICTIM:
        rank.pause()
    join(rank, backend, options)
    return "joined"


def join_without_descriptors(rank: Rank, backend: str, options: Options, _: Any) -> Saw:
    if rank.rank == VICTIM:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_count() + 4, 4096))
    join(rank, backend, options)
    return "joined"


def join_without_ports(rank: Rank, backend: str, options: Options, _: Any) -> Saw:
    """In a network of its own with two ports, and both taken."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("50000 50001")
    with contextlib.ExitStack() as taken:
        for port in (50000, 50001):
            listening = taken.enter_context(socket.socket())
            listening.bind(("", port))
            listening.listen()
        join(rank, backend, options)
    return "joined"


def fork(*_: Any) -> Saw:
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1))
            os._exit(0)
        except Exception:  # what the row is about
            os._exit(1)
    end = time.monotonic() + _FORK_LIMIT_S
    done, status = 0, 0
    while done == 0 and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    when = time.monotonic()
    if done == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    child = "hangs" if done == 0 else "raises" if os.waitstatus_to_exitcode(status) == 1 else "ends"
    dist.all_reduce(ten := torch.ones(10))
    return f"the child {child}, the parent {_returned(ten)}", when


def again_and_again(rank: Rank, backend: str, options: Options, _: Any) -> Saw:
    before = 0, 0
    for cycle in range(GROUPS + 3):
        if cycle == 3:
            before = thread_count(), descriptor_count()
        join(rank, backend, options, store=f"store {cycle}")
        dist.all_reduce(torch.ones(10), group=dist.new_group(backend=backend))
        dist.destroy_process_group()
    gc.collect()
    time.sleep(0.2)
    return f"{thread_count() - before[0]:+} threads, {descriptor_count() - before[1]:+} descriptors"


def train(rank: Rank, backend: str, *_: Any) -> Saw:
    model = DistributedDataParallel(nn.Linear(100, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = None if backend == "gloo" else torchext.attach(model, optimizer, on_peer_failure="continue")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(10, 100)).square().mean().backward()
        optimizer.step()

    while sync is None or not sync.stats()["lost_ranks"]:
        step()
    step()
    when = time.monotonic()
    assert sync is not None
    stats = sync.stats()
    for _ in range(20):
        step()
    dist.destroy_process_group()  # the others may have steps left, and go on without this worker
    return f"trained on with {stats['workers']} workers", when


def reduce_slowly(*_: Any) -> Saw:
    dist.all_reduce(large := torch.ones(10_000_000))
    return _returned(large)
