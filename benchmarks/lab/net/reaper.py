"""Removes network namespaces whose owner is gone, whatever killed it.

A lab's namespaces are called ``txlab-<pid>-<start time>-<serial>-<part>``: the owner can be looked up in
/proc, and the start time tells it from a later process that was given the same pid. Two things call the
functions below: every new lab (for the leavings of older ones), and a small watchdog process that each lab
starts, which sits in a session of its own and so outlives a SIGKILL of the owner and of its process group.

Nothing but the standard library is imported: the watchdog must start fast and stay small.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PREFIX = "txlab"
_NAMESPACES = Path("/run/netns")
_POLL_S = 1.0


def start_time(pid: int) -> int | None:
    """Returns when ``pid`` started, in clock ticks since boot; None when it is dead or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and brackets: the fields begin after the last closing one.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def tag_of(pid: int, serial: int) -> str:
    """Returns the name prefix of lab number ``serial`` of process ``pid``, which must be alive."""
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(f"netlab: process {pid} is not alive, it cannot own a lab")
    return f"{PREFIX}-{pid}-{started}-{serial}"


def owner_is_alive(tag: str) -> bool:
    """Tells whether the process that ``tag`` names still runs; a name that is not ours counts as alive."""
    parts = tag.split("-")
    if len(parts) < 4 or parts[0] != PREFIX or not (parts[1].isdigit() and parts[2].isdigit()):
        return True
    return start_time(int(parts[1])) == int(parts[2])


def namespaces(prefix: str = f"{PREFIX}-") -> list[str]:
    """Returns the names of the network namespaces that begin with ``prefix``."""
    try:
        return sorted(entry.name for entry in _NAMESPACES.iterdir() if entry.name.startswith(prefix))
    except FileNotFoundError:
        return []


def _kill_inside(namespace: os.stat_result) -> None:
    for entry in Path("/proc").iterdir():
        # A process may end at any moment, and a foreign one may not be ours to look at.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.path.samestat((entry / "ns" / "net").stat(), namespace):
                os.kill(int(entry.name), signal.SIGKILL)


def remove(name: str) -> None:
    """Kills what runs inside namespace ``name`` and deletes it, with every link in it.

    Deleting the name alone would leave the namespace alive for as long as a process sits inside.
    """
    with contextlib.suppress(FileNotFoundError):
        # Held open, so that no new namespace is given its number between the two looks.
        handle = os.open(_NAMESPACES / name, os.O_RDONLY)
        try:
            _kill_inside(os.fstat(handle))
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            # Who was on the way in at the first look is inside now, and without the name nobody follows.
            _kill_inside(os.fstat(handle))
        finally:
            os.close(handle)


def remove_tag(tag: str) -> None:
    """Removes all namespaces of one lab."""
    for name in namespaces(f"{tag}-"):
        remove(name)


def remove_orphans() -> list[str]:
    """Removes the namespaces of all labs whose owner is dead; returns their names."""
    orphans = [name for name in namespaces() if not owner_is_alive(name)]
    for name in orphans:
        remove(name)
    return orphans


def start_watchdog(tag: str) -> subprocess.Popen[bytes]:
    """Starts the watchdog of one lab; closing its stdin tells it to clean up and end."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).resolve()), tag],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _watch(tag: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The pipe closes when the owner dies; the look at /proc is for an owner that forked: its child holds the pipe.
    while owner_is_alive(tag):
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    remove_tag(tag)


if __name__ == "__main__":
    _watch(sys.argv[1])
