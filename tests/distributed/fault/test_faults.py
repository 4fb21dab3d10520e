"""What happens when a rank dies, stalls or errs: who is named, how fast, and what stays usable."""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, launch, run_ranks

import torchext

pytestmark = pytest.mark.sanitize

# The requirement is 5 s; the usual time is far below one. In between lies what a loaded runner may need.
DEATH_LIMIT = 3.0


def loop_of_all_reduce() -> None:
    while True:
        dist.all_reduce(torch.ones(100_000))


# ---- A peer is killed ----


def body_killed_in_step(rank: Rank, backend: str) -> Any:
    rank.init(backend, timeout=60)
    dist.all_reduce(torch.ones(1))
    rank.report("ready")
    first = elapsed_error(loop_of_all_reduce)
    untouched = torch.full((4,), 7.0)
    second = elapsed_error(lambda: dist.all_reduce(untouched))
    return first, second, untouched.tolist(), torchext.backend_of().failure


@pytest.mark.parametrize(
    ("backend", "size", "victim"),
    [
        *(("prague", 2, 1), ("prague", 4, 3), ("prague", 4, 0), ("prague", 8, 5)),
        *(("hop", 4, 2), ("dssync", 4, 3), ("dear", 4, 1)),
    ],
)
def test_sigkill_in_all_reduce(backend: str, size: int, victim: int) -> None:
    with launch(body_killed_in_step, size, backend) as ranks:
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
            label = f"{backend} [rank {outcome.rank} of {size}, group "
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
        assert within_a_call > 0 or size == 2, outcomes  # of two, the one survivor may be between calls
        assert took < DEATH_LIMIT


def body_killed_during_wait(rank: Rank, mode: str) -> Any:
    rank.init(timeout=60)
    dist.barrier()
    rank.report("ready")
    if rank.rank == 2:
        time.sleep(60)
    tensor = torch.ones(10)
    if mode == "async":
        work = dist.all_reduce(tensor, async_op=True)
        return elapsed_error(work.wait)
    if mode == "future":
        future = dist.all_reduce(tensor, async_op=True).get_future()
        return elapsed_error(future.wait)
    if mode == "recv":
        return elapsed_error(lambda: dist.recv(tensor, src=2))
    return elapsed_error(lambda: dist.recv(tensor, src=(rank.rank + 1) % 4 if rank.rank != 1 else 0))


@pytest.mark.parametrize("mode", ["async", "future", "recv", "recv_from_others"])
def test_sigkill_while_waiting(mode: str) -> None:
    with launch(body_killed_during_wait, 4, mode) as ranks:
        ranks.expect("ready")
        time.sleep(0.3)
        ranks.kill(2)
        start = time.monotonic()
        for outcome in ranks.outcomes(deadline=20):
            assert outcome.ok, outcome.trace
            kind, text, _ = outcome.value
            assert "rank 2 died" in text, text
            assert mode == "future" or kind == "DistBackendError"
            if mode == "recv":
                assert re.search(r": recv with rank 2 \(float32, 10 elements; [0-9.]+ s after the call\): ", text), text
        assert time.monotonic() - start < DEATH_LIMIT


def body_ddp(rank: Rank) -> Any:
    rank.init(timeout=60)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    rank.report("ready")

    def train() -> None:
        while True:
            model(torch.randn(8, 64)).sum().backward()

    return elapsed_error(train)


def test_sigkill_in_ddp_backward() -> None:
    with launch(body_ddp, 4) as ranks:
        ranks.expect("ready")
        time.sleep(0.5)
        ranks.kill(1)
        start = time.monotonic()
        for outcome in ranks.outcomes(deadline=20):
            assert outcome.ok, outcome.trace
            assert "rank 1 died" in outcome.value[1], outcome.value
        assert time.monotonic() - start < DEATH_LIMIT


def body_two_groups(rank: Rank) -> Any:
    rank.init(timeout=60)
    pair = dist.new_group([0, 1], backend="prague")
    rank.report("ready")
    if rank.rank == 2:
        time.sleep(60)
    world = elapsed_error(loop_of_all_reduce)
    if rank.rank == 3:
        return world, None
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=pair)
    return world, tensor.tolist()


def test_a_group_without_the_dead_rank_goes_on() -> None:
    with launch(body_two_groups, 4) as ranks:
        ranks.expect("ready")
        ranks.kill(2)
        for outcome in ranks.outcomes(deadline=20):
            assert outcome.ok, outcome.trace
            world, pair = outcome.value
            assert "rank 2 died" in world[1]
            assert pair in (None, [2.0] * 3)


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


def body_wait_timeout(rank: Rank) -> Any:
    rank.init()
    tensor = torch.ones(2)
    if rank.rank == 1:
        rank.pause()
        dist.all_reduce(tensor)
        return tensor.tolist()
    work = dist.all_reduce(tensor, async_op=True)
    kind, text, seconds = elapsed_error(lambda: work.wait(timedelta(milliseconds=200)))
    assert kind == "DistBackendError" and "all_reduce #1" in text and "timed out" in text, text
    assert 0.1 < seconds < 2
    rank.report("timed out")
    work.wait()
    return tensor.tolist()


def test_a_wait_that_times_out_leaves_the_call_going() -> None:
    with launch(body_wait_timeout, 2) as ranks:
        ranks.expect("timed out", [0])
        ranks.proceed([1])
        assert ranks.values(20) == [[2.0, 2.0]] * 2


def body_bad_call(rank: Rank) -> Any:
    rank.init()
    error = elapsed_error(lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return error, tensor.tolist()


def test_an_invalid_call_does_not_end_the_group() -> None:
    for error, tensor in run_ranks(body_bad_call, 2):
        assert error[0] in ("RuntimeError", "ValueError")
        assert error[2] < 1
        assert tensor == [2.0, 2.0]
