"""fault_stages says what happens to the ranks of fault_table.py: what stands when they start, and the strike.

Each stage is a context manager in the benchmark's process, made for a number of ranks.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from harness import Ranks, free_port

from lab.faults.fault_acts import VICTIM
from lab.net.netlab import NetLab


@dataclass
class Stage:
    """What stands when the ranks start."""

    setting: Any = None  # what they are told of it
    strike: Callable[[Ranks], None] | None = None  # half a second after they began; returns when the fault is there


StageMaker = Callable[[int], AbstractContextManager[Stage]]


@contextlib.contextmanager
def quiet(_: int) -> Iterator[Stage]:
    """Nothing: what the ranks do is the fault."""
    yield Stage()


@contextlib.contextmanager
def killed(_: int) -> Iterator[Stage]:
    yield Stage(strike=lambda ranks: ranks.kill(VICTIM, signal.SIGKILL))


@contextlib.contextmanager
def stopped(_: int) -> Iterator[Stage]:
    yield Stage(strike=lambda ranks: ranks.kill(VICTIM, signal.SIGSTOP))


_SERVER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, timedelta(seconds=60), wait_for_workers=False)
print("up", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def store_killed(_: int) -> Iterator[Stage]:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", _SERVER, str(port)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            yield Stage(port, lambda _: server.kill())
        finally:
            server.kill()


def cable(*, rate: str | None, down_s: float | None) -> StageMaker:
    """A host for each rank. down_s: how long the victim's cable is out; None: for good."""

    @contextlib.contextmanager
    def stage(world: int) -> Iterator[Stage]:
        with NetLab(world, rate=rate, fallback=False) as lab:

            def strike(_: Ranks) -> None:
                lab.set_link(VICTIM, up=False)
                if down_s is not None:
                    threading.Timer(down_s, lab.set_link, (VICTIM,), {"up": True}).start()

            yield Stage([lab.namespace(host) for host in range(world)], None if down_s == 0 else strike)

    return stage
