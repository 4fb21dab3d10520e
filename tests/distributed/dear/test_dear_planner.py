"""When "dear" trains as plain DDP, and when it does not: decisions made from measured steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import pytest
from harness import Rank, run_ranks
from sharded import EXACT, SIZES, Pair, batch, check_within, each_in_ways, in_forms, made, mlp, sgd

pytestmark = pytest.mark.sanitize

PAUSE = 0.01  # seconds; a step of these models takes one or two milliseconds, on a busy machine a hundred


def run_until_decided(pair: Pair, slow: str, *, most: int, pause: float = PAUSE) -> dict[str, Any]:
    """Steps that are longer while training in the mode `slow`, by more than they vary; until there is a decision."""
    recent = deque([0.0], maxlen=20)
    for _ in range(most):
        if pair.sync.stats()["mode"] == slow:
            time.sleep(pause + 2 * statistics.median(recent))
        start = time.monotonic()
        pair.step()
        recent.append(time.monotonic() - start)
        if pair.sync.stats()["decided"]:
            break
    return pair.sync.stats()


def body_slow(rank: Rank) -> None:
    rank.init("dear")
    for bucket_mb in (0.001, "auto"):
        pair = Pair(rank, made(mlp), sgd, fallback=True, bucket_mb=bucket_mb)
        stats = run_until_decided(pair, "allreduce", most=250)
        assert (stats["mode"], stats["decided"]) == ("dear", True), stats
        assert pair.done() < 1e-5
        pair = Pair(rank, made(mlp), sgd, fallback=True, bucket_mb=bucket_mb)
        stats = run_until_decided(pair, "dear", most=250)
        assert (stats["mode"], stats["decided"]) == ("allreduce", True), stats
        assert not any(module._forward_pre_hooks for module in pair.module.modules())  # nothing is waited for any more
        assert pair.run(3).done() < 1e-5


def test_what_is_slower_is_not_chosen() -> None:
    run_ranks(body_slow, 2, deadline=180)


def body_slower_later(rank: Rank) -> None:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, fallback=True)
    stats = run_until_decided(pair, "allreduce", most=250)
    assert stats["mode"] == "dear", stats
    longer = max(2 * PAUSE, 1.5e-3 * stats["allreduce_step_ms"])  # than an all-reduce took, on a busy machine, too
    for _ in range(90):  # but not long enough to be looked at
        time.sleep(longer)
        pair.step()
    assert pair.sync.stats()["mode"] == "dear"
    for _ in range(10):
        time.sleep(longer)
        pair.step()
    assert pair.sync.stats()["mode"] == "allreduce", pair.sync.stats()
    stats = run_until_decided(pair, "dear", most=80, pause=longer)
    assert (stats["mode"], stats["decided"]) == ("allreduce", True), stats
    assert pair.done() < 1e-4  # 200 steps and more


def test_a_decision_that_does_not_hold_is_taken_back() -> None:
    run_ranks(body_slower_later, 2, deadline=180)


DDP_OPTIONS = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")


def body_forward_alone(rank: Rank) -> dict[str, tuple[str, float]]:
    """Before each step a forward pass that has no backward pass, for the accuracy, say."""
    found = {}
    for option in ("", *DDP_OPTIONS):
        pair = Pair(rank, made(mlp), sgd, fallback=True, bucket_mb="auto", **({option: True} if option else {}))
        modes = ""
        for _ in range(40):
            pair.zero_grad()
            pair.backward()
            pair.ddp(batch(9, 1)[0])
            pair.update()
            modes += str(pair.sync.stats()["mode"])[0]
        found[option] = modes, pair.done()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_forward_pass_alone_before_the_plan_changes(size: int) -> None:
    for found in run_ranks(in_forms, size, body_forward_alone):
        for option, (modes, worst) in found.items():
            assert size == 1 or "ad" in modes, (option, modes)  # one rank alone has no all-reduce to try
            assert worst < EXACT, option


def body_one_looks(rank: Rank) -> float:
    pair = Pair(rank, made(mlp), sgd, bucket_mb="auto", timeout=8)
    for _ in range(40):
        pair.zero_grad()
        pair.backward()
        if rank.rank == 0:
            for group in pair.optimizer.param_groups:
                assert all(parameter.grad is not None for parameter in group["params"])
        pair.update()
    return pair.done()


@pytest.mark.parametrize("size", SIZES)
def test_gradients_that_one_rank_looks_at_while_plans_are_made(size: int) -> None:
    """In the replicated form it waits for the others', which gather theirs in their steps."""
    for worst in run_ranks(each_in_ways, size, [body_one_looks], ["replicated"]):
        check_within(worst)
