"""Inverses that a thread makes while the backward pass waits for gradients: used, made anew, or dropped."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank, elapsed_error, launch, run_ranks
from kfac_net import Net, whole_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC

OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.01, "inverse_update_steps": 1, "shared_memory": False}
STRATEGIES = ("spd", "pad", "comm-opt", "mem-opt", "hybrid")
STEPS = 6  # runs leave in the backward pass from the third on


def backward(model: nn.Module, step: int, rank: int = 0, size: int = 1) -> None:
    image, token, target = (part.chunk(size)[rank] for part in whole_batch(step))
    model.zero_grad()
    nn.functional.cross_entropy(model(image, token), target).backward()


def threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            count += (task / "comm").read_text().strip() == "tx_inverses"
    return count


def alone(rank: Rank, dampings: list[float], **options: Any) -> torch.Tensor:
    groups = [dist.new_group([r]) for r in range(rank.size)]
    model = Net()
    optimizer = KFAC(model, process_group=groups[rank.rank], **(OPTIONS | options))
    for step, damping in enumerate(dampings):
        backward(model, step)
        optimizer.kfac.damping = damping
        optimizer.step()
    return flat(model)


def body_damping(rank: Rank, method: str, changes: bool) -> dict[str, float]:
    """Damping is what it is in step(), whatever it was in the backward pass that sent the factors."""
    rank.init("gloo", timeout=30)
    dampings = [0.01 * (1 + step * changes) for step in range(STEPS)]
    reference = alone(rank, dampings, method=method)
    found = {}
    for strategy in STRATEGIES:
        model = DistributedDataParallel(Net())
        optimizer = KFAC(model, strategy=strategy, method=method, **OPTIONS)
        for step, damping in enumerate(dampings):
            backward(model, step, rank.rank, rank.size)
            optimizer.kfac.damping = damping
            optimizer.step()
        assert optimizer.stats()["runs_overlapped"] > 0 and threads() == 1
        equal_everywhere(model.module)
        found[strategy] = float((flat(model.module) - reference).abs().max())
        del optimizer, model
        gc.collect()
        assert threads() == 0
    return found


@pytest.mark.parametrize("changes", [False, True], ids=["same", "changed"])
@pytest.mark.parametrize("method", ["inverse", "eigen"])
@pytest.mark.parametrize("size", [2, 3])
def test_damping_is_that_of_the_step(size: int, method: str, changes: bool) -> None:
    for found in run_ranks(body_damping, size, method, changes):
        assert max(found.values()) < 1e-9, found


def body_dropped(rank: Rank) -> bool:
    """The optimizer goes after a backward pass whose factors are on their way; another one begins."""
    rank.init("gloo", timeout=30)
    model = DistributedDataParallel(Net())
    for _ in range(2):
        optimizer = KFAC(model, strategy="pad", **OPTIONS)
        for step in range(4):
            backward(model, step, rank.rank, rank.size)
            optimizer.step()
        backward(model, 4, rank.rank, rank.size)
        del optimizer
        gc.collect()
    equal_everywhere(model.module)
    return threads() == 0


def test_an_optimizer_may_go_between_backward_and_step() -> None:
    assert run_ranks(body_dropped, 3) == [True] * 3


def body_peer_stopped(rank: Rank) -> Any:
    """Rank 1 sends no factors; rank 0's thread waits for them while its optimizer goes."""
    rank.init("gloo", timeout=60)
    model = Net()  # without DDP, whose gradients would be waited for first
    optimizer = KFAC(model, strategy="pad", **OPTIONS)
    for step in range(3):
        backward(model, step, rank.rank, rank.size)
        optimizer.step()
    if rank.rank == 0:
        backward(model, 3, rank.rank, rank.size)
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
    """A child that was forked when the thread existed ends without it."""
    rank.init("gloo", timeout=30)
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="spd", **OPTIONS)
    for step in range(4):
        backward(model, step, rank.rank, rank.size)
        optimizer.step()
    backward(model, 4, rank.rank, rank.size)
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
    equal_everywhere(model.module)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_forked_child_lets_go_of_it() -> None:
    assert run_ranks(body_forked, 2) == [7, 7]


def body_killed(rank: Rank) -> Any:
    rank.init("gloo", timeout=60)
    model = Net()
    optimizer = KFAC(model, strategy="spd", **OPTIONS)
    for step in range(3):
        backward(model, step, rank.rank, rank.size)
        optimizer.step()
    if rank.rank == 1:
        rank.report("ready")
        rank.pause()
    backward(model, 3, rank.rank, rank.size)
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
        assert kind == "RuntimeError" and "peer" in text and seconds < 20 and unchanged, (kind, text, seconds)
