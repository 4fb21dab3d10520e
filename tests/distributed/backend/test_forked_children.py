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
from case_choice import quick_on, slow_on
from elastic_training import ElasticTraining
from harness import Rank, launch, run_ranks

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
    rank.report("ready")
    dist.all_reduce(torch.ones(1)) if rank.rank == 0 else time.sleep(300)


@pytest.mark.parametrize(("backend", "options"), slow_on(FORMS, "dssync"))
def test_a_parent_that_is_killed_is_named(backend: str, options: dict[str, Any]) -> None:
    with launch(body_named, 2, backend, options) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        (outcome,) = ranks.outcomes([0], deadline=20)
    assert outcome.error == "DistBackendError" and "rank 1 died" in outcome.message, outcome


def body_goes_on(rank: Rank, backend: str, heartbeat: timedelta) -> Any:
    training = ElasticTraining(rank, backend, {"heartbeat_timeout": heartbeat})
    training.train(3)
    sleeping_child()
    training.train(3)
    rank.report("ready")
    group = torchext.backend_of()
    reason = ""
    while training.workers() == 2:
        training.train(1)
        if not reason and (reason := group.failure[1]):
            rank.report("failed")
    training.train(3)
    return training.sync.stats()["lost_ranks"]


@pytest.mark.parametrize("backend", slow_on(["prague", "dssync", "hop"], "dssync"))
def test_training_goes_on_without_a_parent(backend: str) -> None:
    with launch(body_goes_on, 2, backend, SLOW) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        (outcome,) = ranks.outcomes([0], deadline=30)
    assert outcome.value == [1], outcome


def body_silent(rank: Rank, backend: str) -> Any:
    training = ElasticTraining(rank, backend, {"heartbeat_timeout": timedelta(seconds=1)})
    training.train(3)
    rank.report("ready")
    group = torchext.backend_of()
    if rank.rank == 0:
        while not group.failure[1]:
            time.sleep(0.05)
        rank.report("suspects")
    while training.workers() == 2:
        training.train(1)
    training.train(3)
    return group.failure, training.sync.stats()["lost_ranks"]


@pytest.mark.parametrize("backend", slow_on(["prague", "dssync", "hop"], "dssync"))
def test_a_rank_that_was_silent_first_can_be_dead(backend: str) -> None:
    """The first reason stays, and says nothing about whether the rank lives now."""
    with launch(body_silent, 2, backend) as ranks:
        ranks.expect("ready")
        ranks.kill(1, signal.SIGSTOP)
        ranks.expect("suspects", [0])
        ranks.kill(1)
        (outcome,) = ranks.outcomes([0], deadline=30)
    (failed, reason), lost = outcome.value
    assert failed == 1 and "rank 1" in reason and "died" not in reason, reason
    assert lost == [1]
