"""What happens when a rank dies, stalls or errs: who is named, how fast, and what stays usable."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, launch
from rows import run_rows

import torchext

pytestmark = pytest.mark.sanitize

# The requirement is 5 s; the usual time is far below one. In between lies what a loaded runner may need.
DEATH_LIMIT = 3.0


def loop_of_all_reduce() -> None:
    while True:
        dist.all_reduce(torch.ones(100_000))


# ---- A peer is killed ----


def body_killed_in_step(rank: Rank) -> Any:
    rank.init(timeout=60)
    dist.all_reduce(torch.ones(1))
    rank.report("ready")
    first = elapsed_error(loop_of_all_reduce)
    untouched = torch.full((4,), 7.0)
    second = elapsed_error(lambda: dist.all_reduce(untouched))
    return first, second, untouched.tolist(), torchext.backend_of().failure


# With every backend: tests/cpp/c10d/backend/every_backend_test.cc.
def test_sigkill_in_all_reduce() -> None:
    size, victim = 8, 5
    with launch(body_killed_in_step, size) as ranks:
        ranks.expect("ready")
        time.sleep(0.3)
        start = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.outcomes(deadline=20)
        took = time.monotonic() - start
        reasons = set()
        within_a_call = 0
        for outcome in outcomes:
            assert outcome.ok, outcome.trace
            (kind, text, _), (kind2, text2, seconds2), untouched, failure = outcome.value
            assert kind == kind2 == "DistBackendError"
            label = f"prague [rank {outcome.rank} of {size}, group "
            assert text.startswith(label) and f"rank {victim} died" in text, text
            # A slow survivor can learn of it between two calls: then the next one is refused, before it has a number.
            call = r"all_reduce( #\d+ \(sum, float32, 100000 elements; [0-9.]+ s after the call\))?: "
            found = re.search(call + f"rank {victim} died", text)
            assert found, text
            within_a_call += found[1] is not None
            assert text2.startswith(label) and f"rank {victim} died" in text2, text2
            assert seconds2 < 3  # at once, but for a loaded machine
            assert untouched == [7.0] * 4
            assert failure[0] == victim
            reasons.add(failure[1])
        assert len(reasons) == 1, reasons
        assert within_a_call > 0, outcomes
        assert took < DEATH_LIMIT


VICTIM = 2


def dies_soon() -> None:
    """From outside, as far as what the process is at is concerned."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()


def body_receives(rank: Rank) -> Any:
    rank.init(timeout=60)
    dist.barrier()
    if rank.rank == VICTIM:
        dies_soon()
        time.sleep(60)
    return elapsed_error(lambda: dist.recv(torch.ones(10), src=VICTIM))


def body_ddp(rank: Rank) -> Any:
    rank.init(timeout=60)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))

    def train() -> None:
        while True:
            model(torch.randn(8, 64)).sum().backward()

    if rank.rank == VICTIM:
        dies_soon()
    return elapsed_error(train)


def body_two_groups(rank: Rank) -> Any:
    rank.init(timeout=60)
    pair = dist.new_group([0, 1], backend="prague")
    if rank.rank == VICTIM:
        dies_soon()
        time.sleep(60)
    error = elapsed_error(loop_of_all_reduce)
    if rank.rank < 2:  # the pair goes on
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [2.0] * 3
    return error


def body_of(rank: Rank, body: Callable[[Rank], Any]) -> Any:
    return body(rank)


# In other waits: tests/cpp/c10d/backend/lifecycle_test.cc.
def test_sigkill_while_receiving_in_ddp_and_beside_another_group() -> None:
    rows = {body.__name__[5:]: (body,) for body in (body_receives, body_ddp, body_two_groups)}
    for name, outcomes in run_rows(body_of, 4, rows, victims={VICTIM}).items():
        for outcome in outcomes:
            if outcome.rank == VICTIM:
                assert outcome.message == "exit code -9", (name, outcome)
                continue
            assert outcome.ok, (name, outcome.trace)
            kind, text, seconds = outcome.value
            assert kind == "DistBackendError" and f"rank {VICTIM} died" in text, (name, text)
            says = rf": recv with rank {VICTIM} \(float32, 10 elements; [0-9.]+ s after the call\): "
            assert name != "receives" or re.search(says, text), text
            assert seconds < 0.3 + DEATH_LIMIT, (name, seconds)


# ---- A peer is stopped, late, or wrong ----


def body_stopped(rank: Rank) -> Any:
    rank.init(timeout=2)
    dist.barrier()
    rank.report("ready")
    if rank.rank == 1:
        time.sleep(0.5)
    return elapsed_error(loop_of_all_reduce)


def test_sigstop_honours_the_timeout() -> None:
    with launch(body_stopped, 4) as ranks:
        ranks.expect("ready")
        time.sleep(0.2)
        ranks.kill(1, signal.SIGSTOP)
        start = time.monotonic()
        others = [0, 2, 3]
        for outcome in ranks.outcomes(others, deadline=20):
            assert outcome.ok, outcome.trace
            kind, text, _ = outcome.value
            assert kind == "DistBackendError"
            assert "timed out in all_reduce #" in text, text
            assert "2000" in text, text
        assert 1.5 < time.monotonic() - start < 2 + DEATH_LIMIT
        ranks.kill(1, signal.SIGCONT)


def body_leave(rank: Rank) -> Any:
    rank.init(pg_options=torchext.PragueOptions(heartbeat_timeout=timedelta(seconds=2)))
    dist.barrier()
    rank.report("ready")
    if rank.rank == 1:
        rank.pause()
        dist.destroy_process_group()
        return ""
    for _ in range(30):
        time.sleep(0.02)
        try:
            dist.send(torch.ones(1), 2) if rank.rank == 0 else dist.recv(torch.ones(1), 0)
        except dist.DistBackendError as error:
            return str(error)
    return ""


def test_leaving_a_rank_that_is_held_up_for_a_moment_is_no_death() -> None:
    """Rank 0 has yet to take a heartbeat when rank 1 leaves; it goes on with rank 2."""
    seen = []
    while len(seen) < 3:  # this process may be held up too, for longer than a Leave waits
        with launch(body_leave, 3) as ranks:
            ranks.expect("ready")
            ranks.kill(0, signal.SIGSTOP)
            time.sleep(0.45)  # for two heartbeats
            ranks.proceed([1])
            time.sleep(0.02)
            ranks.kill(0, signal.SIGCONT)
            seen.append(ranks.values())
        if not any(seen[-1]):
            return
    raise AssertionError(seen)
