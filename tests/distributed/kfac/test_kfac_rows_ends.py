"""Rows on their way when something ends: a step left out, an optimizer that goes, a peer that stops or dies."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from dense_net import ROW_OPTIONS, Dense, backward, batch, steps
from harness import Rank, elapsed_error, launch, run_ranks
from thread_ends import check_dead_peer_ends_the_step, check_end_waits_for_no_peer, check_forked_child_lets_go, threads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC


def begin(rank: Rank, ddp: bool, timeout: float) -> tuple[nn.Module, KFAC, Callable[[], None]]:
    """Rows are on their way after the backward pass (thread_ends)."""
    model, optimizer = steps(rank, 2, ddp=ddp, timeout=timeout)
    return model, optimizer, lambda: backward(model, optimizer, 2, rank)


def body_nan(rank: Rank) -> tuple[int, int]:
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
    return optimizer.stats()["skipped"], optimizer.stats()["row_directions_refused"]


def test_a_batch_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    assert run_ranks(body_nan, 2) == [(1, 0)] * 2


def body_left_out(rank: Rank) -> tuple[int, int]:
    """All ranks clear the gradients of a backward pass whose rows have left; then training goes on."""
    model, optimizer = steps(rank, 2)
    backward(model, optimizer, 50, rank)
    for step in range(2, 8):
        backward(model, optimizer, step, rank)  # clears
        optimizer.step()
    equal_everywhere(model.module)
    return optimizer.stats()["row_directions"], optimizer.stats()["row_directions_refused"]


def test_a_step_that_all_ranks_leave_out() -> None:
    # Steps 1, 4, 5 and 7 are of rows; those of step 2 had left with another batch's.
    assert run_ranks(body_left_out, 3) == [(3 * 4, 3)] * 3


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


def test_the_end_of_an_optimizer_waits_for_no_peer() -> None:
    check_end_waits_for_no_peer(begin)


def test_a_forked_child_lets_go_of_it() -> None:
    check_forked_child_lets_go(begin)


def test_a_dead_peer_ends_the_step() -> None:
    check_dead_peer_ends_the_step(begin)


def body_malformed(rank: Rank, counts: list[float], blocks: list[float]) -> Any:
    """Rank 1 sends a message of its own in place of its rows."""
    model, optimizer = steps(rank, 2, ddp=False, timeout=60)
    if rank.rank == 1:
        message = torch.tensor([1, *counts, *blocks], dtype=torch.float64)  # rows were gathered once
        own_group = list(dist.distributed_c10d._world.pg_map)[-1]  # the optimizer's is the newest
        own_group.send([message], 0, ROWS_TAG).wait()
        rank.pause()
    backward(model, optimizer, 2, rank)
    before = flat(model)
    error = elapsed_error(optimizer.step)
    rank.report("refused")
    return error, torch.equal(before, flat(model))


ROWS_TAG = 3 << 20  # kfac_tags.h
WHOLE, PACKED = [1.0] * 6, [0.0] * 6
ALL_THERE = struct.unpack("<d", b"\xff" * 8)[0]  # a mask that says that no element is zero


@pytest.mark.parametrize(
    ("counts", "blocks"),
    [
        ([1e6, 6, 6], WHOLE),
        ([-2, 6, 6], WHOLE),
        ([float("nan"), 6, 6], WHOLE),
        ([6, 6, float("inf")], WHOLE),
        ([6, 6, 6], [*PACKED, *[ALL_THERE] * 1038]),
    ],
    ids=["too many", "negative", "nan", "inf", "more than there is"],
)
def test_what_is_no_rows_is_an_error_that_names_the_rank(counts: list[float], blocks: list[float]) -> None:
    with launch(body_malformed, 2, counts, blocks) as ranks:
        ranks.expect("refused", [0])
        ranks.proceed([1])
        outcome, _ = ranks.outcomes()
        (kind, text, seconds), unchanged = outcome.value
        assert kind == "DistBackendError" and "what rank 1 has sent is no rows" in text, (kind, text)
        assert seconds < 20 and unchanged
