"""Two ranks that live for the whole suite, so that a script takes tens of milliseconds and not seconds.

The test's process holds the store; each case has a prefix of its own in it. Ranks that hang, die, or end with an error
of another kind than a refusal are replaced: what a broken case leaves behind must not touch the next.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist
from harness import Ranks, launch
from worker import Job, Told, serve

WORLD = 2
# Within it a group's own timeout is to end what hangs.
TIMEOUT_S = 12.0
DEADLINE_S = 25.0
CLOSING_S = 10.0
# New processes now and then, as a leak of one case would be seen in the next thousand otherwise.
LIFE = 500


class Pool:
    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store.set_timeout(timedelta(seconds=60))
        self._port = self._store.port
        self._numbers = itertools.count()
        self._stack = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        self._ran = 0

    def run(self, source: str, form: str, *, double: bool, deadline_s: float = DEADLINE_S) -> list[Told | None]:
        """How the script ended on each rank; None: it had not by the deadline, or its process died."""
        if self._ran >= LIFE:
            self.retire()
        ranks = self._ranks or self._start()
        self._ran += 1
        timeout_s = min(TIMEOUT_S, deadline_s / 2)
        job = Job(source, form, f"case {next(self._numbers)}", timeout_s, double)
        for line in ranks._lines:
            line.send(job)
        told: list[Any] = self._replies(ranks, deadline_s)
        if any(one is None for one in told):
            self.retire()
            return told
        closings = self._replies(ranks, CLOSING_S)
        for one, closing in zip(told, closings, strict=True):
            one.closing = "it did not end" if closing is None else closing
        if any(one.closing or (one.error and not one.ours) for one in told):
            self.retire()
        return told

    def _replies(self, ranks: Ranks, deadline_s: float) -> list[Any]:
        replies: list[Any] = [None] * WORLD
        lines = {line: rank for rank, line in enumerate(ranks._lines)}
        end = time.monotonic() + deadline_s
        while lines and (left := end - time.monotonic()) > 0:
            for line in wait(list(lines), timeout=left):
                rank = lines.pop(line)  # type: ignore[index]
                with contextlib.suppress(EOFError, OSError):
                    kind, *rest = line.recv()  # type: ignore[union-attr]
                    replies[rank] = rest[0] if kind == "report" else None
        return replies

    def _start(self) -> Ranks:
        self._ranks = self._stack.enter_context(launch(serve, WORLD, self._port))
        self._ran = 0
        return self._ranks

    def retire(self) -> None:
        """Ends the processes; the next case starts new ones."""
        self._ranks = None
        self._stack.close()


@contextlib.contextmanager
def open_pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.retire()
