"""A forked child (a DataLoader's worker) holds none of the group's connections: its parent's death is seen at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS
from case_choice import quick_on
from elastic_training import ElasticTraining
from harness import Rank, run_ranks
from rows import meet, run_rows

import torchext

# No heartbeat of these tells within the deadlines below that a rank is gone.
SLOW = timedelta(seconds=300)
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {}),
    ("dssync", {}),
    ("hop", {}),
    ("dear", {"form": "sharded"}),
    ("dear", {"form": "replicated"}),
]


def sockets() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = str(Path(f"/proc/self/fd/{number}").readlink())
        except FileNotFoundError:  # that of the listing itself
            continue
        if target.startswith("socket:") or target == "anon_inode:[eventpoll]":
            found.add(f"{number} {target}")
    return found


LIST_SOCKETS = """
import os
for number in os.listdir("/proc/self/fd"):
    try:
        print(number, os.readlink(f"/proc/self/fd/{number}"))
    except FileNotFoundError:
        pass
"""


def body_sockets(rank: Rank, backend: str) -> Any:
    before = sockets()
    rank.init(backend)
    dist.all_reduce(torch.ones(1))
    opened = sockets() - before
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        left = sockets() & opened
        os.write(write, f"{len(left)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    executed = subprocess.run([sys.executable, "-c", LIST_SOCKETS], close_fds=False, capture_output=True, text=True)
    inherited = {line for line in executed.stdout.splitlines() if line in opened and "socket:" in line}
    dist.all_reduce(torch.ones(1))  # the parent's connections live
    return len(opened), os.read(read, 10).decode(), inherited


@pytest.mark.parametrize("backend", quick_on("prague"))
def test_children_have_none_of_the_sockets(backend: str) -> None:
    for opened, forked, executed in run_ranks(body_sockets, 2, backend):
        assert opened >= 6  # of two groups: listener, connection, event loop
        assert forked == "0"
        assert executed == set()


def sleeping_child() -> None:
    if os.fork() == 0:
        time.sleep(120)  # the harness ends it with this process' group
        os._exit(0)


def body_named(rank: Rank, backend: str, options: dict[str, Any]) -> Any:
    rank.init(backend, timeout=300, pg_options=OPTIONS[backend](heartbeat_timeout=SLOW, **options))
    dist.all_reduce(torch.ones(1))
    sleeping_child()
    dist.all_reduce(torch.ones(1))
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_parent_that_is_killed_is_named() -> None:
    rows = {f"{backend} {options}": (backend, options) for backend, options in FORMS}
    for name, outcomes in run_rows(body_named, 2, rows, victims={1}, deadline=20).items():
        first = outcomes[0]
        assert first.error == "DistBackendError" and "rank 1 died" in first.message, (name, first)


ELASTIC = {backend: (backend,) for backend in ("prague", "dssync", "hop")}


def body_goes_on(rank: Rank, backend: str) -> Any:
    training = ElasticTraining(rank, backend, {"heartbeat_timeout": SLOW})
    training.train(3)
    sleeping_child()
    training.train(3)
    meet(rank, "has a child")
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while training.workers() == 2:
        training.train(1)
    training.train(3)
    return training.sync.stats()["lost_ranks"]


def test_training_goes_on_without_a_parent() -> None:
    for name, outcomes in run_rows(body_goes_on, 2, ELASTIC, victims={1}, deadline=30).items():
        assert outcomes[0].ok and outcomes[0].value == [1], (name, outcomes[0])


def body_silent(rank: Rank, backend: str) -> Any:
    training = ElasticTraining(rank, backend, {"heartbeat_timeout": timedelta(seconds=1)})
    training.train(3)
    pid = rank.folder / "pid"
    if rank.rank == 1:
        pid.write_text(str(os.getpid()))
    meet(rank, "trains")
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group = torchext.backend_of()
    while not group.failure[1]:
        time.sleep(0.05)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    while training.workers() == 2:
        training.train(1)
    training.train(3)
    return group.failure, training.sync.stats()["lost_ranks"]


def test_a_rank_that_was_silent_first_can_be_dead() -> None:
    """The first reason stays, and says nothing about whether the rank lives now."""
    for name, outcomes in run_rows(body_silent, 2, ELASTIC, victims={1}, deadline=30).items():
        assert outcomes[0].ok and not outcomes[1].ok, (name, outcomes)
        (failed, reason), lost = outcomes[0].value
        assert failed == 1 and "rank 1" in reason and "died" not in reason, (name, reason)
        assert lost == [1], name
