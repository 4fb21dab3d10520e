"""A rank that is stopped, stuck or late: who is named, when, and what is no alarm."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS
from case_choice import quick_on
from harness import Rank, elapsed_error, free_port, launch, run_ranks
from rows import await_others, row_values
from test_faults import loop_of_all_reduce

import torchext

pytestmark = pytest.mark.sanitize

# What a loaded runner may add.
SLACK = 4.0


def init(rank: Rank, heartbeat: float, timeout: float) -> None:
    heartbeat_timeout = timedelta(seconds=heartbeat)
    options = torchext.PragueOptions(heartbeat_timeout=heartbeat_timeout, timeout=timedelta(seconds=timeout))
    rank.init(timeout=timeout, pg_options=options)


# ---- Stopped ----


def body_stopped(rank: Rank, heartbeat: float, timeout: float) -> Any:
    init(rank, heartbeat, timeout)
    dist.all_reduce(torch.ones(100_000))
    rank.report("ready")
    first = elapsed_error(loop_of_all_reduce)
    second = elapsed_error(lambda: dist.all_reduce(torch.ones(1)))
    return first, second, torchext.backend_of().failure


# With every backend: tests/cpp/c10d/backend/every_backend_test.cc.
def test_a_stopped_rank_is_named() -> None:
    heartbeat, size, victim = 1.0, 8, 5
    with launch(body_stopped, size, heartbeat, 60.0) as ranks:
        ranks.expect("ready")
        time.sleep(0.3)
        ranks.kill(victim, signal.SIGSTOP)
        start = time.monotonic()
        others = [rank for rank in range(size) if rank != victim]
        reasons = set()
        for outcome in ranks.outcomes(others, deadline=30):
            assert outcome.ok, outcome.trace
            (kind, text, _), second, failure = outcome.value
            assert kind == second[0] == "DistBackendError"
            # It was at a call, as was the rank that watched it.
            says = rf"rank {victim} has been silent for [0-9.]+ s; it is at all_reduce #\d+, rank \d at all_reduce #\d+"
            assert re.search(says, text) and re.search(says, second[1]), (text, second)
            assert failure[0] == victim
            reasons.add(failure[1])
        assert len(reasons) == 1, reasons
        assert 0.5 * heartbeat < time.monotonic() - start < heartbeat + SLACK
        # Woken up, it learns the same, and does not hang.
        ranks.kill(victim, signal.SIGCONT)
        (late,) = ranks.outcomes([victim], deadline=20)
        assert late.ok and late.value[0][0] == "DistBackendError", late


def test_without_heartbeats_the_timeout_ends_it() -> None:
    with launch(body_stopped, 3, 0.0, 2.0) as ranks:
        ranks.expect("ready")
        time.sleep(0.3)
        ranks.kill(1, signal.SIGSTOP)
        for outcome in ranks.outcomes([0, 2], deadline=20):
            assert "timed out in all_reduce" in outcome.value[0][1], outcome.value
        ranks.kill(1, signal.SIGCONT)


def body_thousand(rank: Rank, heartbeat: float) -> Any:
    init(rank, heartbeat, 60.0)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    rank.report("ready")
    for step in range(1000):
        dist.all_reduce(tensor.fill_(1.0))
        assert tensor[0].item() == rank.size
        if step % 200 == 100 and rank.rank == 0:
            rank.report(f"step {step}")
    return torchext.backend_of().failure


def test_stalls_below_the_limit_are_no_alarm() -> None:
    """A thousand iterations, in which ranks are stopped for a second at a time; a flap of a link looks the same."""
    with launch(body_thousand, 4, 3.0) as ranks:
        ranks.expect("ready")
        for stalls, step in enumerate(range(100, 700, 200)):
            ranks.expect(f"step {step}", [0])
            victim = stalls + 1
            ranks.kill(victim, signal.SIGSTOP)
            time.sleep(1.0)
            ranks.kill(victim, signal.SIGCONT)
        assert ranks.values() == [(-1, "")] * 4


# ---- Alive, but not there ----


def body_stuck(rank: Rank, numel: int) -> Any:
    log = rank.folder / f"log of {rank.rank}"
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    init(rank, 0.5, 3.0)
    for _ in range(8):
        dist.all_reduce(torch.ones(10))
    if rank.rank == 1:
        await_others(rank)
        return None
    first = elapsed_error(lambda: dist.all_reduce(torch.ones(numel)))
    untouched = torch.full((4,), 7.0)
    second = elapsed_error(lambda: dist.all_reduce(untouched))
    return first, second, untouched.tolist(), torchext.backend_of().failure, log.read_text()


# A call like those before starts at once and waits in Gloo; a new one waits for all ranks to agree.
def test_a_rank_that_is_stuck_elsewhere_is_suspected_then_named_at_the_timeout() -> None:
    found = row_values(body_stuck, 4, {"predicted": (10,), "new": (20,)})
    for name, values in found.items():
        for (kind, text, seconds), (kind2, text2, seconds2), untouched, failure, log in (values[r] for r in (0, 2, 3)):
            assert kind == kind2 == "DistBackendError", name
            says = r"rank 1 has not called all_reduce #9, its last call is all_reduce #8, [0-9.]+ s ago; rank \d "
            assert re.search(says + "timed out", text) and re.search(says + "timed out", text2), (name, text, text2)
            assert failure[0] == 1, (name, failure)
            assert untouched == [7.0] * 4 and seconds2 < 1 + SLACK, name
            # Suspected long before, in the log of each that waits, once.
            (after,) = re.findall(says + r"called it ([0-9.]+) s ago, and waits on", log)
            assert 0.5 <= float(after) < 3.0, (name, log)
            assert 2.5 < seconds < 3.0 + SLACK, (name, seconds)


def body_holds_the_lock(rank: Rank) -> Any:
    init(rank, 1.0, 60.0)
    dist.all_reduce(torch.ones(10))
    if rank.rank == 1:
        ctypes.PyDLL(None).usleep(2_500_000)  # with the interpreter lock held
    dist.all_reduce(torch.ones(10))
    return torchext.backend_of().failure


def test_a_rank_that_holds_the_interpreter_lock_goes_on_beating() -> None:
    assert run_ranks(body_holds_the_lock, 3) == [(-1, "")] * 3


# ---- The store ----

STORE = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, timedelta(seconds=60), wait_for_workers=False)
print("up", flush=True)
time.sleep(600)
"""


def body_store(rank: Rank, port: int, backend: str) -> Any:
    store = dist.TCPStore("127.0.0.1", port, rank.size, False, timedelta(seconds=60))
    options = OPTIONS[backend](heartbeat_timeout=timedelta(seconds=0.5))
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size, pg_options=options)
    dist.all_reduce(torch.ones(10))
    rank.report("ready")
    rank.pause()
    end = time.monotonic() + 1.5
    while True:
        dist.all_reduce(torch.ones(10))
        # Every rank stops in the same round.
        again = torch.tensor([float(time.monotonic() < end)])
        dist.all_reduce(again, op=dist.ReduceOp.MIN)
        if again.item() == 0:
            break
    return torchext.backend_of().failure


@pytest.mark.parametrize("backend", quick_on("prague"))
def test_a_group_outlives_the_store(backend: str) -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        with launch(body_store, 3, port, backend) as ranks:
            ranks.expect("ready")
            server.kill()
            server.wait()
            ranks.proceed()
            assert ranks.values() == [(-1, "")] * 3
    finally:
        server.kill()
        server.wait()
