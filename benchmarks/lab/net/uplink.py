"""An uplink's counter says how many bytes cross between the racks of a lab between two moments."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lab.net.netlab import NetLab

__all__ = ["SAMPLE_S", "UplinkCounter", "counting"]

SAMPLE_S = 0.2


class UplinkCounter(threading.Thread):
    """Samples the uplink's counters, and tells how many bytes crossed it between two moments."""

    def __init__(self, lab: NetLab) -> None:
        super().__init__(daemon=True)
        self.lab = lab
        self.samples: list[tuple[float, int]] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        """Samples until stopped."""
        while not self.stopped.wait(SAMPLE_S):
            self.samples.append((time.monotonic(), self.lab.uplink_bytes()))

    def between(self, begin: float, end: float) -> float:
        """Returns the bytes between two moments by ``time.monotonic()``, interpolated between samples."""
        return self._at(end) - self._at(begin)

    def _at(self, moment: float) -> float:
        for (before, low), (after, high) in itertools.pairwise(self.samples):
            if before <= moment <= after:
                return low + (high - low) * (moment - before) / (after - before)
        raise ValueError(f"uplink: no sample of the uplink around {moment}")


@contextmanager
def counting(lab: NetLab) -> Iterator[UplinkCounter]:
    """Counts inside the block."""
    counter = UplinkCounter(lab)
    counter.start()
    try:
        yield counter
    finally:
        counter.stopped.set()
        counter.join()
