"""One rank of a launch: what the launcher starts, and what a benchmark's rank function is given."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.run.board import Board

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000
_TIMEOUT = datetime.timedelta(seconds=120)


class Rank:
    """Handed to a rank function.

    Attributes:
        rank: Of this process.
        world_size: Of the launch.
        settings: What the launching script passed, through JSON.
        board: Barriers and the stop sign.
    """

    def __init__(self, rank: int, world_size: int, settings: Mapping[str, Any], board: Board) -> None:
        self.rank, self.world_size, self.settings, self.board = rank, world_size, settings, board
        self._store: Any = None
        self._sessions = 0

    @contextlib.contextmanager
    def process_group(self, backend: str, options: Any = None) -> Iterator[None]:
        """Makes the default group of all ranks, and destroys it at the end; may be entered many times.

        One store serves all of them, each under a prefix of its own: re-binding the port each time would race.

        Args:
            backend: Its name.
            options: ``pg_options``.
        """
        # Late: a rank function without torch starts fast. Any: torch's stubs do not export the stores.
        dist: Any = importlib.import_module("torch.distributed")
        if self._store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(host, port, self.world_size, self.rank == 0, timeout=_TIMEOUT)
        self._sessions += 1
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"session{self._sessions}", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=_TIMEOUT,
            pg_options=options,
        )
        yield  # without a finally: after an error, destroying the group could wait for ranks that are gone
        dist.destroy_process_group()
        self.board.barrier()  # rank 0 holds the store: nobody may end while others still leave through it


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["LAB_PARENT"]):
        sys.exit("lab: the launcher is gone")


def _sharpen_timers() -> None:
    """Asks Linux to wake this thread, and those it will start, within 1 us of a deadline, not the usual 50 us."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)


def main(folder: Path) -> None:
    """Runs the rank function that ``folder/job.json`` names and writes what it returns beside it."""
    _die_with_parent()
    _sharpen_timers()
    job = json.loads((folder / "job.json").read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    function = getattr(importlib.import_module(job["module"]), job["function"])
    board = Board(folder / "board", rank, world_size)
    board.barrier()  # imports take seconds, and not the same ones: no timeout of a backend should count them
    result = function(Rank(rank, world_size, job["settings"], board))
    part = folder / f"rank{rank}.part"
    part.write_text(json.dumps(result, default=str))
    part.rename(folder / f"rank{rank}.json")
    board.barrier()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # no destructors: one that waits for a peer would keep the launcher from seeing the failure
    # Nor here: models outlive the groups that they were trained in, and torch at times terminates a process that ends
    # while a thread of such a group still runs.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
