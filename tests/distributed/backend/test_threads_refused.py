"""The system refuses threads that a group needs: an error on that rank, and a reason on the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from harness import Rank, run_ranks

from torchext.backends import resources

pytestmark = pytest.mark.sanitize


def body_check(rank: Rank, backend: str) -> Any:
    start, started = threading.Thread.start, 0

    def refused(self: threading.Thread) -> None:
        nonlocal started
        if self.name == "torchext_check":
            started += 1
            if started > 5:
                raise RuntimeError("can't start new thread")
        start(self)

    threads = threading.active_count()
    if rank.rank == 1:
        threading.Thread.start = refused  # type: ignore[method-assign]
    try:
        with pytest.raises((OSError, RuntimeError)) as caught:
            rank.init(backend, timeout=60)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    assert threading.active_count() == threads
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("backend", ["prague", "dear"])
def test_too_few_for_gloo(backend: str) -> None:
    """Gloo itself would end the process: it is not asked."""
    other, refused = run_ranks(body_check, 2, backend)
    assert refused[0] == "BlockingIOError" and "refuses this process more than 5" in refused[1], refused
    assert other[0] == "DistStoreError" and "rank 1 cannot join the group: BlockingIOError" in other[1], other


def test_the_check_leaves_nothing() -> None:
    before = threading.active_count()
    resources.check_resources(2, 2)
    assert threading.active_count() == before
