"""A rank that cannot join a group, for want of descriptors, ports or an interface: an error at once on all.

Each is the whole process'. For want of threads, or of the right options: tests/python/backends/test_making_groups.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import Rank, descriptor_count, elapsed_error, free_port, run_ranks
from rows import row_values

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


Cases = list[tuple[str, int]]


def on_all(body: Callable[..., Any], cases: Cases) -> Iterator[tuple[str, int, list[Any]]]:
    """(row, victim, errors of its ranks)"""
    rows = {f"{backend}, rank {victim}": (backend, victim, free_port()) for backend, victim in cases}
    for name, errors in row_values(body, 3, rows).items():
        yield name, rows[name][1], errors


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("prague", 0), ("prague", 1), ("prague", 2)], id="prague"),
        # The line is one of Python, whatever the backend.
        pytest.param([("dear", 1), ("dssync", 1), ("hop", 1)], id="others", marks=pytest.mark.slow),
    ],
)
def test_too_few_descriptors(cases: Cases) -> None:
    """The others do not wait for their timeout: they learn at once who does not come, and why."""
    for row, victim, errors in on_all(body_few_descriptors, cases):
        for rank, (kind, text, seconds) in enumerate(errors):
            refused = f"[Errno {errno.EMFILE}]" in text and "Too many open files" in text and "ulimit -n" in text
            assert refused, (row, errors)
            assert kind == ("OSError" if rank == victim else "DistStoreError"), (row, errors)
            assert rank == victim or f"rank {victim} cannot join the group: OSError" in text, (row, errors)
            assert seconds < 10, (row, errors)


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
    "cases",
    [
        pytest.param([("prague", 0), ("prague", 2)], id="prague"),
        # The line is one of Python, whatever the backend.
        pytest.param([("dear", 1), ("dssync", 1), ("hop", 1), ("hop", 0)], id="others", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_cannot_connect(cases: Cases) -> None:
    """The others wait for its address, and learn that there will be none; then all join."""
    for row, victim, errors in on_all(body_no_interface, cases):
        for rank, (kind, text, seconds) in enumerate(errors):
            assert "nonsense" in text, (row, errors)
            assert rank == victim or kind == "DistStoreError", (row, errors)
            assert rank == victim or f"rank {victim} cannot connect to the others: RuntimeError" in text, (row, errors)
            assert seconds < 10, (row, errors)


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
