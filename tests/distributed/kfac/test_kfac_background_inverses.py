"""Inverses that a thread makes while the backward pass waits for gradients: used, made anew, or dropped."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank, run_ranks
from kfac_net import Net, whole_batch
from thread_ends import check_dead_peer_ends_the_step, check_end_waits_for_no_peer, check_forked_child_lets_go, threads
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


def begin(rank: Rank, ddp: bool, timeout: float, strategy: str = "spd") -> tuple[nn.Module, KFAC, Callable[[], None]]:
    """Factors are on their way after the backward pass (thread_ends)."""
    rank.init("gloo", timeout=timeout)
    model = DistributedDataParallel(Net()) if ddp else Net()
    optimizer = KFAC(model, strategy=strategy, **OPTIONS)
    for step in range(3):
        backward(model, step, rank.rank, rank.size)
        optimizer.step()
    return model, optimizer, lambda: backward(model, 3, rank.rank, rank.size)


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
        assert optimizer.stats()["runs_overlapped"] > 0 and threads("tx_inverses") == 1
        equal_everywhere(model.module)
        found[strategy] = float((flat(model.module) - reference).abs().max())
        del optimizer, model
        gc.collect()
        assert threads("tx_inverses") == 0
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
    return threads("tx_inverses") == 0


def test_an_optimizer_may_go_between_backward_and_step() -> None:
    assert run_ranks(body_dropped, 3) == [True] * 3


def test_the_end_of_an_optimizer_waits_for_no_peer() -> None:
    check_end_waits_for_no_peer(partial(begin, strategy="pad"))


def test_a_forked_child_lets_go_of_it() -> None:
    check_forked_child_lets_go(begin)


def test_a_dead_peer_ends_the_step() -> None:
    check_dead_peer_ends_the_step(begin)
