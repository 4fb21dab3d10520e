"""What the tests of the benchmark lab share: where it is, what it needs, waiting."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lab.net import netlab, reaper  # noqa: E402
from lab.report import bounds, plot, results, timeline, tuning  # noqa: E402
from lab.run import cli, launch  # noqa: E402
from lab.workloads import contenders, emulated, language, stragglers, training  # noqa: E402

__all__ = [
    "BENCHMARKS",
    "bounds",
    "cli",
    "contenders",
    "emulated",
    "eventually",
    "language",
    "launch",
    "needs_namespaces",
    "netlab",
    "plot",
    "reaper",
    "results",
    "stragglers",
    "timeline",
    "training",
    "tuning",
]

needs_namespaces = pytest.mark.skipif(
    netlab.missing() is not None, reason=f"no network namespaces can be made: {netlab.missing()}"
)


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
