"""A page of memory that the ranks of one launch share: barriers and a stop sign that need no network.

The timed loops must not be measured through the thing that they measure, and asking the store every step costs a
round trip. All ranks of a lab are on one machine, so a mapped file serves. Each word has one writer.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_WORD = 8
_STOP = 0


class Board:
    """The page, as one rank sees it.

    Args:
        path: The file; made by ``create``.
        rank: Of the caller.
        world_size: Of the launch.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        # Aligned 8-byte stores through a cast memoryview are single instructions: no reader sees half of one.
        view = memoryview(self._map)
        self._count = view[: (1 + world_size) * _WORD].cast("q")
        self._clock = view[(1 + world_size) * _WORD :].cast("d")
        self.rank, self.world_size = rank, world_size
        self._barriers = 0

    @staticmethod
    def create(path: Path, world_size: int) -> None:
        """Makes the file: a stop word, a counter and two times a rank."""
        path.write_bytes(bytes((1 + 3 * world_size) * _WORD))

    def barrier(self, *, deadline_s: float = 120.0, poll_s: float = 0.0005) -> float:
        """Waits for all ranks.

        Args:
            deadline_s: How long, before it raises TimeoutError with the ranks that are missing.
            poll_s: How often to look. Ranks that wait beside a measurement should not look often.

        Returns:
            When the last rank arrived, by ``time.monotonic()``: the same number on every rank.
        """
        self._barriers += 1
        number = self._barriers
        # Two sets of times in turn: nobody can be two barriers ahead of a rank that still reads.
        times = (number % 2) * self.world_size
        self._clock[times + self.rank] = time.monotonic()
        self._count[1 + self.rank] = number
        give_up = time.monotonic() + deadline_s
        while True:
            absent = [rank for rank in range(self.world_size) if self._count[1 + rank] < number]
            if not absent:
                return max(self._clock[times + rank] for rank in range(self.world_size))
            if time.monotonic() > give_up:
                waited = f"rank {self.rank} waited {deadline_s:g} s at barrier {number}"
                raise TimeoutError(f"board: {waited} for ranks {absent}")
            time.sleep(poll_s)

    def start_together(self, *, after_s: float = 0.003) -> float:
        """Waits for all ranks, then until one moment that all agree on, ``after_s`` past the last arrival.

        A barrier alone lets ranks go up to a poll apart. Returns the moment, by ``time.monotonic()``.
        """
        moment = self.barrier() + after_s
        time.sleep(max(0.0, moment - time.monotonic()))
        return moment

    @property
    def stop_step(self) -> int:
        """The step after which everybody stops; 0 while nobody has decided. Written by rank 0 alone."""
        return self._count[_STOP]

    @stop_step.setter
    def stop_step(self, step: int) -> None:
        if self.rank != 0:
            raise PermissionError(f"board: rank {self.rank} may not stop the others, rank 0 does")
        self._count[_STOP] = step
