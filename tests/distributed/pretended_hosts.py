"""Ranks of one machine that pass for ranks of several hosts."""

from __future__ import annotations

import ctypes
import os
import socket

import pytest

__all__ = ["be_on_host", "needs_root"]

_CLONE_NEWUTS = 0x04000000

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a host name of its own takes root")


def be_on_host(number: int) -> None:
    """Gives this process, and what it starts from now on, a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"host{number}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name has no address
