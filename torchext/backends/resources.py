"""Resources that a group takes of the operating system are checked before it is made.

Gloo without descriptors ends the process (SIGABRT), without its second thread it hangs, and without ports it reports
something else. So a rank that lacks them says so first, before it meets the others, which then learn who is missing.
"""

from __future__ import annotations

import errno
import os
import socket
import threading

__all__ = ["check_resources"]

# Of one inner group: its listening socket, the event loop's, pipes, and one connection a peer with room for another.
_OWN_DESCRIPTORS = 8
_DESCRIPTORS_A_PEER = 2
# Of one inner group: the event loop's, and those that run collectives.
_THREADS = 3
# Of the group's watch over its ranks and calls.
_OWN_THREADS = 4


def check_resources(size: int, inner_groups: int) -> None:
    """Raises if this process cannot open what a group needs.

    Args:
        size: Ranks of the group.
        inner_groups: How many Gloo groups it stands on.

    Raises:
        OSError: ``EMFILE`` when descriptors do not suffice; the error of ``bind`` when no port is free; ``EAGAIN``
            when the system refuses a thread.
    """
    _check_descriptors(inner_groups * (_OWN_DESCRIPTORS + _DESCRIPTORS_A_PEER * (size - 1)))
    _check_ports()
    _check_threads(inner_groups * _THREADS + (_OWN_THREADS if size > 1 else 0))


def _check_descriptors(wanted: int) -> None:
    try:
        import resource

        open_now = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return  # not Linux: nothing to count
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and open_now + wanted > limit:
        raise OSError(
            errno.EMFILE,
            f"{os.strerror(errno.EMFILE)}: the group may need {wanted} descriptors, and {open_now} of {limit} are open;"
            " raise the limit (ulimit -n), or close what is not needed",
        )


def _check_ports() -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("", 0))
        except OSError as error:
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno or 0)}: no TCP port is free to listen on; widen"
                " net.ipv4.ip_local_port_range, or see which connections hold them (ss -tan)",
            ) from error


def _check_threads(wanted: int) -> None:
    """Starts as many at once, and ends them."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=over.wait, name="torchext_check", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise OSError(
            errno.EAGAIN,
            f"{os.strerror(errno.EAGAIN)}: the group needs {wanted} threads, and the system refuses this process more"
            f" than {len(started)} ({error}); raise the limit of processes (ulimit -u, or the container's limit of"
            " pids), or run fewer of them",
        ) from error
    finally:
        over.set()
        for thread in started:
            thread.join()
