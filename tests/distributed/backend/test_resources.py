"""A rank that cannot join a group, for want of descriptors, ports or the right options: an error at once on all."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from case_choice import slow_on
from harness import Rank, descriptor_count, elapsed_error, free_port, run_ranks

import torchext

pytestmark = pytest.mark.sanitize

CLONE_NEWNET = 0x40000000


def body_few_descriptors(rank: Rank, backend: str, victim: int, port: int) -> Any:
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, rank.size, rank.rank == 0, limit)

    def join() -> None:
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size, timeout=limit)

    if rank.rank == victim:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_count() + 12, 4096))
    error = elapsed_error(join)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    join()
    dist.barrier()
    return error


@pytest.mark.parametrize(
    ("backend", "victim"),
    slow_on(
        [("prague", 0), ("prague", 1), ("prague", 2), ("dear", 1), ("dssync", 1), ("hop", 1)], "dear", "dssync", "hop"
    ),
)
def test_too_few_descriptors(backend: str, victim: int) -> None:
    """The others do not wait for their timeout: they learn at once who does not come, and why."""
    errors = run_ranks(body_few_descriptors, 3, backend, victim, free_port())
    for rank, (kind, text, seconds) in enumerate(errors):
        assert f"[Errno {errno.EMFILE}]" in text and "Too many open files" in text and "ulimit -n" in text, errors
        assert kind == ("OSError" if rank == victim else "DistStoreError"), errors
        assert rank == victim or f"rank {victim} cannot join the group: OSError" in text, errors
        assert seconds < 10, errors


def body_no_interface(rank: Rank, backend: str, victim: int, port: int) -> Any:
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, rank.size, rank.rank == 0, limit)

    def join() -> None:
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size, timeout=limit)

    if rank.rank == victim:
        os.environ["GLOO_SOCKET_IFNAME"] = "nonsense"
    error = elapsed_error(join)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    join()
    dist.barrier()
    return error


@pytest.mark.parametrize(
    ("backend", "victim"),
    slow_on(
        [("prague", 0), ("prague", 2), ("dear", 1), ("dssync", 1), ("hop", 1), ("hop", 0)], "dear", "dssync", "hop"
    ),
)
def test_a_rank_that_cannot_connect(backend: str, victim: int) -> None:
    """The others wait for its address, and learn that there will be none; then all join."""
    errors = run_ranks(body_no_interface, 3, backend, victim, free_port())
    for rank, (kind, text, seconds) in enumerate(errors):
        assert "nonsense" in text, errors
        assert rank == victim or kind == "DistStoreError", errors
        assert rank == victim or f"rank {victim} cannot connect to the others: RuntimeError" in text, errors
        assert seconds < 10, errors


def body_one_comes_late(rank: Rank, victim: int) -> Any:
    if rank.rank == 3:
        time.sleep(2)
    options = torchext.HopOptions() if rank.rank == victim else None
    return elapsed_error(lambda: rank.init("prague", timeout=60, pg_options=options))


@pytest.mark.parametrize("victim", [0, 1])
def test_who_comes_late_learns_it_too(victim: int) -> None:
    """The last rank says hello when the others know already that there will be no group."""
    errors = run_ranks(body_one_comes_late, 4, victim)
    assert errors[victim][0] == "BackendOptionsError", errors
    for rank in {0, 1, 2, 3} - {victim}:
        kind, text, seconds = errors[rank]
        assert kind == "DistStoreError" and f"rank {victim} cannot join the group: BackendOptionsError" in text, errors
        assert seconds < 10, errors


def body_wrong_options(rank: Rank, victim: int) -> Any:
    options = torchext.HopOptions() if rank.rank == victim else None
    return elapsed_error(lambda: rank.init("prague", timeout=60, pg_options=options))


@pytest.mark.parametrize("victim", [0, 1])
def test_options_of_another_backend_on_one_rank(victim: int) -> None:
    errors = run_ranks(body_wrong_options, 2, victim)
    assert errors[victim][0] == "BackendOptionsError", errors
    kind, text, seconds = errors[1 - victim]
    assert kind == "DistStoreError" and f"rank {victim} cannot join the group: BackendOptionsError" in text, errors
    assert seconds < 10, errors


def body_alone(rank: Rank) -> Any:
    return elapsed_error(lambda: rank.init("prague", timeout=60, world_size=2, pg_options=torchext.HopOptions()))


def test_a_rank_that_is_refused_does_not_wait_for_others() -> None:
    ((kind, _, seconds),) = run_ranks(body_alone, 1)
    assert kind == "BackendOptionsError" and seconds < 30  # five


def body_no_ports(rank: Rank) -> Any:
    """A network of its own with two ports, and both taken."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        return "not allowed: " + os.strerror(ctypes.get_errno())
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    try:
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("50000 50001")
    except OSError as error:
        return f"not allowed: {error}"
    taken = [socket.socket() for _ in range(2)]
    for port, each in enumerate(taken):
        each.bind(("", 50000 + port))
        each.listen()
    error = elapsed_error(lambda: rank.init("prague", timeout=2))
    for each in taken:
        each.close()
    rank.init("prague", store="again", timeout=5)
    dist.destroy_process_group()
    return error


def test_no_free_port() -> None:
    (error,) = run_ranks(body_no_ports, 1)
    if isinstance(error, str):
        pytest.skip(error)
    kind, text, _ = error
    assert kind == "OSError" and "no TCP port is free to listen on" in text, error
    assert f"[Errno {errno.EADDRINUSE}]" in text or f"[Errno {errno.EADDRNOTAVAIL}]" in text, text
