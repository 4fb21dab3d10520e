"""K-FAC through memory that the ranks of a host share: the same numbers, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
import torch
from attached import equal_everywhere, flat
from harness import Rank, elapsed_error, launch, run_ranks
from kfac_net import OPTIONS, Net, check_alike, run_alone, train
from rows import row, values_in_one_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC

pytestmark = pytest.mark.sanitize

DIRECTIONS = 8 * (4 * 10 + 4 * 19 + 7 * 6 + 9 * 23 + 3 * 9)  # bytes of Net's, all layers
SPLIT = 8 * (4 * 10 + 9 * 23 + 3 * 9)  # of those that can be split by columns
STEPS = 5


def body_alike(rank: Rank, strategy: str, split: bool | None) -> tuple[list[float], list[dict[str, Any]]]:
    expected = run_alone(rank, STEPS, "inverse") if strategy != "dp" else None
    models, plans, stats = [], [], []
    for shared in (True, False):
        model = DistributedDataParallel(Net())
        optimizer = KFAC(model, strategy=strategy, split_directions=split, shared_memory=shared, **OPTIONS)
        assert (optimizer.plan().as_dict["sharing"] is not None) == shared
        assert ("memory" in str(optimizer.plan())) == shared
        train(model, optimizer, STEPS, rank=rank.rank, size=rank.size)
        equal_everywhere(model.module)
        models.append(model.module)
        plans.append(optimizer.plan())
        stats.append(optimizer.stats())
    # Nothing is added up under dp, and two terms give one sum in either order. Under spd measured costs choose who
    # inverts what, and which directions are made of rows.
    exact = strategy == "dp" or (strategy == "mem-opt" and rank.size == 2)
    check_alike(models, plans, atol=0 if exact else 1e-12)
    return [] if expected is None else [float((flat(models[0]) - expected).abs().max())], stats


def check_alike_by_messages(outcomes: list[Any], split: bool | None) -> None:
    size = len(outcomes)
    for errors, (shared, _) in outcomes:
        assert all(error < 1e-9 for error in errors)
        assert shared["shared_bytes"] > 0
    assert all(messages["shared_bytes"] == 0 for _, (_, messages) in outcomes)
    through_memory = sum(shared["shared_bytes"] for _, (shared, _) in outcomes)
    factors = sum(messages["reduce_bytes"] + messages["all_reduce_bytes"] for _, (_, messages) in outcomes)
    # A rank's, in an update: one number for the step, and how many rows each of Net's five layers has had.
    votes = size * outcomes[0][1][0]["inverse_updates"] * 8 * (1 + 5)
    if split:  # whose inverses travel depends on measured costs
        assert through_memory >= STEPS * SPLIT + factors + votes
    else:
        assert through_memory == STEPS * DIRECTIONS + factors + votes
        # What went through memory was not sent as well.
        fewer = sum(messages["sent_bytes"] - shared["sent_bytes"] for _, (shared, messages) in outcomes)
        assert fewer == (size - 1) * (through_memory - factors)
    assert all(shared["reduce_bytes"] == shared["all_reduce_bytes"] == 0 for _, (shared, _) in outcomes)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_same_directions_as_by_messages(size: int) -> None:
    splits = {"spd": True, "mem-opt": None, "dp": None}
    cases = {strategy: (body_alike, strategy, split) for strategy, split in splits.items()}
    for strategy, outcomes in values_in_one_group(cases, size).items():
        with row(strategy):
            check_alike_by_messages(outcomes, splits[strategy])


def body_large(rank: Rank) -> None:
    """Directions of several pieces of a window, more than it has slots, of different lengths on the two ranks."""
    rank.init("gloo")
    models, plans = [], []
    for shared in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(1201, 700), nn.Tanh(), nn.Linear(700, 30)))
        optimizer = KFAC(model, lr=0.1, strategy="mem-opt", inverse_update_steps=5, shared_memory=shared)
        for step in range(6):
            batch = torch.randn(8, 1201, generator=torch.Generator().manual_seed(10 * step + rank.rank))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        equal_everywhere(model.module)
        models.append(model.module)
        plans.append(optimizer.plan())
    check_alike(models, plans, atol=0)


def test_directions_longer_than_the_window() -> None:
    run_ranks(body_large, 2)


def body_lost(rank: Rank, how: str) -> Any:
    rank.init("gloo", timeout=60)
    model = DistributedDataParallel(Net(), broadcast_buffers=False)
    optimizer = KFAC(model, strategy="mem-opt", **(OPTIONS | {"inverse_update_steps": 100}))
    train(model, optimizer, 2, rank=rank.rank, size=rank.size)
    gradients = [parameter.grad for parameter in model.parameters()]
    rank.report("ready")
    if rank.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        del optimizer
        rank.pause()
        return None
    assert all(gradient is not None for gradient in gradients)
    first = elapsed_error(optimizer.step)
    second = elapsed_error(optimizer.step)
    rank.report("done")
    return first, second


@pytest.mark.parametrize(("how", "says"), [("dies", "rank 1 died"), ("leaves", "rank 1 has left")])
def test_who_does_not_come_any_more_is_named_at_once(how: str, says: str) -> None:
    with launch(body_lost, 2, how) as ranks:
        ranks.expect("done", ranks=[0])
        if how == "leaves":
            ranks.proceed([1])
        outcome = ranks.outcomes([0])[0]
    assert outcome.ok, outcome.trace
    (kind, text, seconds), (again, again_text, _) = outcome.value
    assert kind == again == "DistBackendError"
    assert f"torchext.optim: K-FAC's exchange: {says} while rank 0 waited for it" in text
    assert "an earlier exchange was interrupted" in again_text
    assert seconds < 5  # of a timeout of 60


def body_forked(rank: Rank) -> bool:
    """A forked child that drops its copy of the optimizer does not leave in the parent's name."""
    rank.init("gloo", timeout=20)
    model = DistributedDataParallel(Net())
    holder = [KFAC(model, strategy="mem-opt", **OPTIONS)]
    train(model, holder[0], 2, rank=rank.rank, size=rank.size)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            holder[0]._engine = None  # type: ignore[attr-defined]
            holder.clear()
        os._exit(0)
    os.waitpid(child, 0)
    train(model, holder[0], 4, first=2, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    return True


def test_a_forked_child_does_not_leave_for_its_parent() -> None:
    assert run_ranks(body_forked, 2) == [True, True]
