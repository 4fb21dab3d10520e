"""Rows on their way when something ends: a step left out, an optimizer that goes, a peer that stops or dies."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from attached import equal_everywhere, flat
from dense_net import ROW_OPTIONS, Dense, backward, batch, steps
from harness import Rank, elapsed_error, launch, run_ranks
from rows import values_in_one_group
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC


def threads(name: str) -> int:
    """How many threads of this process have this name."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            count += (task / "comm").read_text().strip() == name
    return count


def body_nan(rank: Rank) -> tuple[int, int, int]:
    model, optimizer = steps(rank, 2)
    before = flat(model.module)
    inputs = batch(2).chunk(rank.size)[rank.rank].clone()
    inputs[0, 0] = float("nan") if rank.rank == 1 else 0.0
    model(inputs).square().mean().backward()
    optimizer.step()
    assert torch.equal(flat(model.module), before)
    for step in range(2, 6):
        backward(model, optimizer, step, rank)
        optimizer.step()
    equal_everywhere(model.module)
    stats = optimizer.stats()
    return stats["skipped"], stats["row_directions"], stats["row_directions_refused"]


def body_left_out(rank: Rank) -> tuple[int, int]:
    """All ranks clear the gradients of a backward pass whose rows have left; then training goes on, as without it."""
    flats = []
    for left_out in (False, True):
        model, optimizer = steps(rank, 2)
        if left_out:
            backward(model, optimizer, 50, rank)
        for step in range(2, 8):
            backward(model, optimizer, step, rank)  # clears
            optimizer.step()
        equal_everywhere(model.module)
        flats.append(flat(model.module))
    torch.testing.assert_close(*flats, rtol=1e-9, atol=1e-12)
    return optimizer.stats()["row_directions"], optimizer.stats()["row_directions_refused"]


def test_a_step_that_is_skipped_or_left_out_on_all_ranks() -> None:
    cases = {"not finite on one rank": (body_nan,), "left out on all": (body_left_out,)}
    found = values_in_one_group(cases, 3, timeout=20)
    # Steps 1, 2, 4 and 5 are of rows.
    assert found["not finite on one rank"] == [(1, 3 * 4, 0)] * 3
    # Steps 1, 4, 5 and 7 are of rows; those of step 2 had left with another batch's.
    assert found["left out on all"] == [(3 * 4, 3)] * 3


def body_gone(rank: Rank) -> bool:
    """The optimizer goes after a backward pass whose rows are on their way; another one begins."""
    rank.init("gloo", timeout=30)
    model = DistributedDataParallel(Dense())
    for _ in range(2):
        optimizer = KFAC(model, gather_rows=True, **ROW_OPTIONS)
        for step in range(5):
            backward(model, optimizer, step, rank)
            optimizer.step()
        assert threads("tx_rows") == 1
        backward(model, optimizer, 5, rank)
        del optimizer
        gc.collect()
    equal_everywhere(model.module)
    return threads("tx_rows") == 0


def test_an_optimizer_may_go_between_backward_and_step() -> None:
    assert run_ranks(body_gone, 3) == [True] * 3


def body_peer_stopped(rank: Rank) -> float:
    """Rank 1 sends nothing; rank 0's thread waits for it while its optimizer goes."""
    # Without DDP, whose gradients would be waited for first.
    model, optimizer = steps(rank, 2, ddp=False, timeout=60)
    if rank.rank == 0:
        backward(model, optimizer, 2, rank)
        start = time.monotonic()
        del optimizer
        gc.collect()
        seconds = time.monotonic() - start
        rank.report("gone")
        return seconds
    rank.pause()
    return 0.0


def test_the_end_of_an_optimizer_waits_for_no_peer() -> None:
    with launch(body_peer_stopped, 2) as ranks:
        ranks.expect("gone", [0])
        ranks.proceed([1])
        gone, _ = ranks.outcomes()
        assert gone.ok and gone.value < 5, gone


def body_forked(rank: Rank) -> int:
    """A child that was forked when the thread existed ends without it; the parent goes on."""
    model, optimizer = steps(rank, 2, timeout=30)
    backward(model, optimizer, 2, rank)
    child = os.fork()
    if child == 0:
        del optimizer
        gc.collect()
        os._exit(7)
    optimizer.step()
    end = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.02)
    equal_everywhere(model)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_forked_child_lets_go_of_it() -> None:
    assert run_ranks(body_forked, 2) == [7, 7]


def body_killed(rank: Rank) -> Any:
    model, optimizer = steps(rank, 2, ddp=False, timeout=60)
    if rank.rank == 1:
        rank.report("ready")
        rank.pause()
    backward(model, optimizer, 2, rank)
    before = flat(model)
    error = elapsed_error(optimizer.step)
    return error, torch.equal(before, flat(model))


def test_a_dead_peer_ends_the_step() -> None:
    """What the thread's wait throws is thrown by step(), which changes nothing."""
    with launch(body_killed, 2) as ranks:
        ranks.expect("ready", [1])
        ranks.kill(1)
        (outcome,) = ranks.outcomes([0], deadline=40)
        (kind, text, seconds), unchanged = outcome.value
        assert kind == "DistBackendError" and "peer" in text and seconds < 20 and unchanged, (kind, text, seconds)
