"""Ranks, here threads, that make a group, or learn why there is none. Of Gloo's refusals: tests/distributed/backend."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import Ended, join, on_ranks, values
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed import DistStoreError

import torchext
from torchext.backends import BACKENDS, resources
from torchext.errors import BackendOptionsError

pytestmark = pytest.mark.sanitize

SHORT = timedelta(seconds=1)


@pytest.mark.parametrize(("backend", "size"), [("prague", 2), ("dear", 2), ("hop", 4), ("dssync", 8)])
def test_a_rank_that_never_joins_is_named(backend: str, size: int) -> None:
    store, absent = HashStore(), size - 1
    ended = on_ranks(absent, lambda rank: join(backend, store, rank, size, timeout=SHORT))
    for rank, each in ended.items():
        text = each.said(DistStoreError)
        assert text.startswith(f"rank {rank}"), text
        assert f": ranks [{absent}] did not join the group within 1 s" in text, text


def test_the_timeout_is_that_of_torch() -> None:
    with pytest.raises(DistStoreError, match=r"^rank 0 of 2: ranks \[1\] did not join the group within 0\.5 s"):
        dist.init_process_group("prague", store=HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=500))
    assert not dist.is_initialized()


def others_learn(ended: dict[int, Ended], victim: int, reason: str) -> None:
    for rank, each in ended.items():
        if rank != victim:
            text = each.said(DistStoreError)
            assert f"rank {victim} cannot join the group: {reason}" in text, text
            assert each.seconds < 10, each


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_options_of_another_backend_on_one_rank(victim: int, late: bool) -> None:
    """Who says hello when the others know already that there will be no group learns it, too."""
    store, size = HashStore(), 4 if late else 2

    def body(rank: int) -> None:
        if rank == 3:
            time.sleep(1)
        join("prague", store, rank, size, torchext.HopOptions() if rank == victim else None)

    ended = on_ranks(size, body)
    assert "leave it out, or pass torchext.PragueOptions(...)" in ended[victim].said(BackendOptionsError)
    others_learn(ended, victim, "BackendOptionsError: pg_options for backend 'prague' is ")


def test_a_rank_that_is_refused_does_not_wait_for_others() -> None:
    ended = on_ranks(1, lambda rank: join("prague", HashStore(), rank, 2, torchext.HopOptions()))
    ended[0].said(BackendOptionsError)
    assert ended[0].seconds < 20  # five, for those that come late


@pytest.mark.parametrize(
    ("backend", "options", "text"),
    [
        ("prague", {"call_check": "off"}, 'heartbeat_timeout = 5 s, call_check = "off"'),
        ("dear", {"heartbeat_timeout": timedelta(seconds=1)}, 'heartbeat_timeout = 1 s, call_check = "new"'),
    ],
)
def test_ranks_that_watch_each_other_differently_are_told(backend: str, options: dict[str, Any], text: str) -> None:
    store, make = HashStore(), BACKENDS[backend].options
    ended = on_ranks(3, lambda rank: join(backend, store, rank, 3, make(**(options if rank == 1 else {}))))
    for each in ended.values():
        said = each.said(ValueError)
        assert f'rank 0 has heartbeat_timeout = 5 s, call_check = "new", rank 1 has {text}' in said, said


def refuse_threads(monkeypatch: pytest.MonkeyPatch, to: str, beyond: int) -> None:
    """The system gives the thread of this name no more than so many others."""
    start, started = threading.Thread.start, 0

    def refused(self: threading.Thread) -> None:
        nonlocal started
        if self.name == "torchext_check" and threading.current_thread().name == to:
            started += 1
            if started > beyond:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.parametrize("backend", ["prague", "dear"])
def test_too_few_threads_for_gloo(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Gloo itself would end the process: it is not asked."""
    store, before = HashStore(), threading.active_count()
    refuse_threads(monkeypatch, "rank 1", 5)
    ended = on_ranks(2, lambda rank: join(backend, store, rank, 2))
    assert "refuses this process more than 5" in ended[1].said(BlockingIOError)
    others_learn(ended, 1, "BlockingIOError")
    assert threading.active_count() == before


def test_the_check_of_resources_leaves_nothing() -> None:
    before = threading.active_count()
    resources.check_resources(2, 2)
    assert threading.active_count() == before


def test_groups_over_a_used_store(tmp_path: Path) -> None:
    # Held throughout: the last FileStore on a file that goes removes it, under a rank that has just opened it anew.
    held_open = FileStore(str(tmp_path / "one"), 3)

    def body(rank: int) -> list[float]:
        sums = []
        for _ in range(5):
            group = join("prague", FileStore(str(tmp_path / "one"), 3), rank, 3)
            tensor = torch.ones(1)
            group.allreduce([tensor]).wait()
            group.shutdown()
            sums.append(tensor.item())
        return sums

    assert values(3, body) == [[3.0] * 5] * 3
    assert held_open.num_keys() > 0


class Aborted:
    """A group of eight, in which rank 1 calls abort() from another thread while all but rank 0 wait for rank 0."""

    def __init__(self, mode: str) -> None:
        self.mode, self.store = mode, HashStore()
        self.met, self.over = threading.Barrier(8), threading.Barrier(8)
        self.at = 0.0

    def body(self, rank: int) -> float:
        """When the wait of this rank ended."""
        group = join("prague", self.store, rank, 8, timeout=timedelta(seconds=60))
        for _ in range(4 if self.mode == "predicted" else 0):  # from the third on calls are predicted: start at once
            group.allreduce([torch.ones(10)]).wait()
        self.met.wait(30)
        if rank == 1:
            threading.Timer(0.3, self.abort, (group,)).start()
        if rank == 0:
            while group.failure == (-1, ""):
                time.sleep(0.01)
        else:
            tensors = [torch.ones(10)]
            with pytest.raises(dist.DistBackendError, match=r"rank 1 called abort\(\)"):
                (group.recv(tensors, 0, 0) if self.mode == "recv" else group.allreduce(tensors)).wait()
        ended = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"rank 1 called abort\(\)"):
            group.allreduce([torch.ones(1)])
        self.over.wait(30)
        start = time.monotonic()
        group.shutdown()
        assert time.monotonic() - start < 2
        return ended

    def abort(self, group: Any) -> None:
        self.at = time.monotonic()
        group.abort()
        group.abort()


@pytest.mark.parametrize("mode", ["new", "predicted", "recv"])
def test_abort_ends_the_waits_of_every_rank_at_once(mode: str) -> None:
    """Also those within Gloo. With a network that is none, and every backend: tests/cpp/c10d/backend."""
    shortest = [float("inf")] * 8
    for _ in range(5):
        group = Aborted(mode)
        shortest = [
            min(so_far, ended - group.at) for so_far, ended in zip(shortest, values(8, group.body), strict=True)
        ]
    # A loaded machine delays the one or the other; a period of grace would delay all.
    assert max(shortest) < 0.1, shortest
