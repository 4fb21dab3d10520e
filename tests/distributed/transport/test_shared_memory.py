"""Averages of ranks that share a host's memory: who shares, that the numbers are right, and that nobody waits for ever.

The values of partial_all_reduce with and without shared memory are in test_partial_all_reduce.py.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import new_group
from harness import Rank, elapsed_error, launch, run_ranks
from rows import row

import torchext

PIECES = 200_003  # float32 elements: several pieces of a window, the last one odd
DEATH_LIMIT = 5.0


def windows() -> int:
    """How many windows this process has mapped, its own and its peers'."""
    return Path("/proc/self/maps").read_text().count("/memfd:torchext")


def descriptors() -> list[str]:
    """What this process has open."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            names.append(str(descriptor.readlink()))
    return names


# ---- Who shares ----


def body_mixed(rank: Rank) -> Any:
    # Each rank's own choice: one that wants none is left alone by the others.
    rank.init(pg_options=torchext.PragueOptions(shared_memory=rank.rank != 2))
    backend = torchext.backend_of()
    for step, members in enumerate(([0, 1], [0, 1, 3], [1, 2], [0, 1, 2, 3])):
        if rank.rank in members:
            tensor = torch.arange(PIECES).remainder(251).add(rank.rank + step).float()
            expected = torch.arange(PIECES).remainder(251).add(step).double() + sum(members) / len(members)
            backend.partial_all_reduce(tensor, members).wait()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=0)
    return backend.shared_memory_ranks


def test_who_wants_none_is_left_out() -> None:
    assert run_ranks(body_mixed, 4) == [[0, 1, 3], [0, 1, 3], [2], [0, 1, 3]]


def body_life(rank: Rank) -> Any:
    before = windows()
    rank.init()
    backend = torchext.backend_of()
    mapped = windows()
    open_files = [name for name in descriptors() if "torchext" in name and "stacks" not in name]  # the harness's
    # Groups of some ranks have numbers of their own.
    part = dist.new_group([1, 2, 3])
    shared = torchext.backend_of(part).shared_memory_ranks if rank.rank else None
    with_part = windows()
    alone = dist.new_group([rank.rank], use_local_synchronization=True)
    one = torchext.backend_of(alone).shared_memory_ranks
    dist.destroy_process_group()
    del backend, part, alone
    return before, mapped, shared, with_part, one, windows(), open_files


def test_windows_come_and_go_with_their_group() -> None:
    for me, (before, mapped, shared, with_part, one, after, open_files) in enumerate(run_ranks(body_life, 4)):
        assert before == 0
        assert mapped == 4, "the own one and three peers'"
        assert open_files == [], "nobody needs the files' descriptors once they are mapped"
        assert shared == ([0, 1, 2] if me else None)
        assert with_part == (7 if me else 4)
        assert one == [0]
        assert after == 0


# ---- Values ----


def train_attached(rank: Rank, name: str, options: dict[str, Any], shared_memory: bool) -> torch.Tensor:
    """Returns the weights of this rank."""
    torch.manual_seed(rank.rank)
    group = new_group(name, shared_memory=shared_memory, **options)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 300, bias=False), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = torchext.attach(model, optimizer)
    for _ in range(6):
        model(torch.randn(4, 200)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.wait()
    weights = model.module.weight.detach().clone()
    sync.detach()
    stats = sync.stats()
    assert stats["averages"] > 0
    sizes = 4 * 200 * 300 * stats["averages"]
    # All data through one way or the other, and what is sent beside shared memory are headers.
    assert stats["bytes_shared"] >= (sizes if shared_memory else 0)
    assert (stats["bytes_sent"] < sizes / 100) == shared_memory
    assert shared_memory or stats["bytes_shared"] == 0
    return weights


def body_attached(rank: Rank) -> None:
    rank.init()
    # Who averages with whom does not depend on time.
    for name, options in (("prague", {"generator": "static"}), ("dssync", {"group_size": 2})):
        with row(name):
            through_memory, sent = (train_attached(rank, name, options, shared) for shared in (True, False))
            torch.testing.assert_close(through_memory, sent)


def test_an_attached_model() -> None:
    run_ranks(body_attached, 4)


# ---- Faults ----


def averages(members: list[int]) -> None:
    """Nearly all of a call's time is spent in windows, so that is where a fault falls."""
    backend, tensor = torchext.backend_of(), torch.zeros(8_000_000)
    while True:
        backend.partial_all_reduce(tensor, members).wait()


def body_averages(rank: Rank, timeout: float, heartbeat: float) -> Any:
    rank.init(timeout=timeout, pg_options=torchext.PragueOptions(heartbeat_timeout=timedelta(seconds=heartbeat)))
    members = [0, 1] if rank.rank < 2 else [2, 3, 4]
    torchext.backend_of().partial_all_reduce(torch.zeros(PIECES), members).wait()
    rank.report("ready")
    return elapsed_error(lambda: averages(members))


# Slow: one of a pair. The other case's is one of three, and the pair hears of it.
@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sigkill(victim: int) -> None:
    with launch(body_averages, 5, 60, 5) as ranks:
        ranks.expect("ready")
        time.sleep(0.4)
        ranks.kill(victim)
        start = time.monotonic()
        for outcome in ranks.outcomes(deadline=20):
            assert outcome.ok, outcome.trace
            kind, text, _ = outcome.value
            assert kind == "DistBackendError"
            assert "prague" in text and f"rank {victim} died" in text, text
        assert time.monotonic() - start < DEATH_LIMIT


def test_sigstop_honours_the_timeout() -> None:
    with launch(body_averages, 5, 2, 0) as ranks:
        ranks.expect("ready")
        time.sleep(0.4)
        ranks.kill(1, signal.SIGSTOP)
        start = time.monotonic()
        outcome = ranks.outcomes([0], deadline=20)[0]
        assert outcome.ok, outcome.trace
        kind, text, _ = outcome.value
        assert kind == "DistBackendError"
        assert "partial_all_reduce with rank 1" in text and "2000" in text, text
        assert 1.5 < time.monotonic() - start < 2 + DEATH_LIMIT
        ranks.kill(1, signal.SIGCONT)


def test_sigstop_is_noticed_by_the_heartbeat() -> None:
    with launch(body_averages, 5, 60, 1) as ranks:
        ranks.expect("ready")
        time.sleep(0.4)
        ranks.kill(3, signal.SIGSTOP)
        for outcome in ranks.outcomes([0, 1, 2, 4], deadline=20):
            assert outcome.ok, outcome.trace
            assert outcome.value[0] == "DistBackendError" and "rank 3" in outcome.value[1], outcome.value
        ranks.kill(3, signal.SIGCONT)


def body_aborts(rank: Rank) -> Any:
    rank.init(timeout=60, pg_options=torchext.PragueOptions(heartbeat_timeout=timedelta(0)))
    backend = torchext.backend_of()
    backend.partial_all_reduce(torch.zeros(PIECES), [0, 1]).wait()
    rank.report("ready")
    if rank.rank == 0:
        aborted = []

        def abort() -> None:
            rank.pause()
            aborted.append(time.monotonic())
            backend.abort()

        thread = threading.Thread(target=abort)
        thread.start()
        kind, text, _ = elapsed_error(lambda: averages([0, 1]))
        took = time.monotonic() - aborted[0]
        thread.join()
        return kind, text, took
    return elapsed_error(lambda: averages([0, 1]))


def test_abort_ends_a_wait_in_a_window() -> None:
    with launch(body_aborts, 2) as ranks:
        ranks.expect("ready")
        time.sleep(0.3)
        ranks.kill(1, signal.SIGSTOP)
        time.sleep(0.3)
        ranks.proceed([0])
        outcome = ranks.outcomes([0], deadline=20)[0]
        assert outcome.ok, outcome.trace
        kind, text, took = outcome.value
        assert kind == "DistBackendError" and "abort" in text, text
        assert took < DEATH_LIMIT
        ranks.kill(1, signal.SIGCONT)
