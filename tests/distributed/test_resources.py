"""Descriptors or ports run out: an exception with the cause when a group is made; the others learn who is missing."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import Rank, descriptor_count, elapsed_error, run_ranks

from torchext.backends import BACKENDS

CLONE_NEWNET = 0x40000000


def body_few_descriptors(rank: Rank, backend: str) -> Any:
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_count() + 12, 4096))
    return elapsed_error(lambda: rank.init(backend, timeout=2))


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_too_few_descriptors(backend: str) -> None:
    errors = run_ranks(body_few_descriptors, 3, backend)
    kind, text, seconds = errors[1]
    assert kind == "OSError" and f"[Errno {errno.EMFILE}]" in text, errors[1]
    assert "Too many open files" in text and "ulimit -n" in text and seconds < 1.5
    assert "ranks [1] did not join the group" in errors[0][1], errors[0]


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
