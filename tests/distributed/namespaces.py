"""Takes this process into a network namespace, as `ip netns exec` starts a new one there.

For processes that are forked, which have imported torch already. Before any other thread is started: the kernel moves
the thread that asks, and threads that it starts.
"""

from __future__ import annotations

import ctypes
import os
import socket

_CLONE_NEWNET = 0x40000000  # of <linux/sched.h>
_CLONE_NEWUTS = 0x04000000


def enter(namespace: str, hostname: str = "") -> None:
    """Into a namespace that `ip netns` has made; with a name of its own for the host, if one is given."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(libc.setns(descriptor, _CLONE_NEWNET), namespace)
    finally:
        os.close(descriptor)
    if hostname:
        _check(libc.unshare(_CLONE_NEWUTS), hostname)
        socket.sethostname(hostname)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)
