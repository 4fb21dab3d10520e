"""Several models of one loop, each with groups of its own: no order of steps makes workers wait for ever."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, equal_everywhere, mlp, new_group
from case_choice import slow_on
from harness import Rank, launch, run_ranks
from rows import row
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

MODELS = 3
STEPS = 25
PAUSES = (0.0, 0.15)  # longer than a model waits for its average before the others drain theirs


def check_between_steps(rank: Rank, order: str, what: str) -> None:
    """What is no collective of the model's group blocks, too, while others may wait for an average with this rank."""
    trainer = Trainer(rank, order=order)
    for turn in range(8):
        for _ in range(4):
            trainer.step()
            if rank.rank == turn % 2:
                time.sleep(0.01)
        if what == "new_group":
            dist.new_group(backend="prague")
        elif what == "split_group":
            dist.split_group(split_ranks=[[0, 1]])
        elif rank.rank == turn % 2:
            dist.send(torch.ones(1), 1 - rank.rank)
        else:
            dist.recv(torch.ones(1), 1 - rank.rank)
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()


# torch 2.11 splits groups of a device only (device_id).
BETWEEN = ["new_group", *([] if torch.__version__.startswith("2.11") else ["split_group"]), "message"]


def body_between_steps(rank: Rank) -> None:
    rank.init()
    for order, what in itertools.product(ORDERS, BETWEEN):
        with row(order, what):
            check_between_steps(rank, order, what)


def test_calls_between_steps_that_wait_for_others() -> None:
    run_ranks(body_between_steps, 2)


def check_asking_meanwhile(rank: Rank, order: str) -> None:
    """Rank 0 asks for a group under a collective, and waits for that before its step; the other waits for the group."""
    trainer = Trainer(rank, order=order)
    trainer.run(3)
    total = torch.ones(1)
    if rank.rank == 0:
        work = dist.all_reduce(total, async_op=True)
        trainer.loss().backward()
        work.wait()
        trainer.optimizer.step()
    else:
        trainer.run(2)
        trainer.sync.wait()
        dist.all_reduce(total)
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    assert float(total) == 2.0
    trainer.sync.detach()


# What arrives of rank 0's ones and rank 1's twos; of messages those that rank 1 sends. The others are sums.
ARRIVES = {"message": 2.0, "messages": 2.0, "partial": 1.5}


def begin(what: str, rank: Rank) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """Begins what takes both ranks, and returns how to wait for it and what it arrives in."""
    backend, other, world = torchext.backend_of(), 1 - rank.rank, dist.group.WORLD
    total = torch.full((2,), 1.0 + rank.rank)
    message = dist.irecv if rank.rank == 0 else dist.isend
    if what == "message":
        return message(total, other).wait, [total]
    if what == "messages":
        world._start_coalescing(torch.device("cpu"))
        parts = [total[:1].clone(), total[1:].clone()]
        for part in parts:
            message(part, other)
        return world._end_coalescing(torch.device("cpu")).wait, parts
    if what == "partial":
        partial = backend.partial_all_reduce(total, [0, 1])
        return lambda: partial.wait(timedelta(seconds=20)), [total]
    if what == "reduce_scatter":
        part = torch.zeros(1)
        return dist.reduce_scatter_tensor(part, total, async_op=True).wait, [part]
    work = dist.all_reduce(total, async_op=True)
    if what == "limited":
        return lambda: work.wait(timedelta(seconds=20)), [total]
    assert what == "polled"

    def poll() -> None:
        for _ in range(400):
            with contextlib.suppress(dist.DistBackendError):
                work.wait(timedelta(milliseconds=50))
                return
        raise AssertionError("never complete")

    return poll, [total]


def finish(what: str, begun: tuple[Callable[[], Any], list[torch.Tensor]]) -> None:
    wait, arrived = begun
    wait()
    assert set(torch.cat(arrived).tolist()) == {ARRIVES.get(what, 3.0)}, arrived


def check_waiting_later(rank: Rank, order: str, what: str) -> None:
    """Rank 0 begins something, steps, asks for a group, and waits; the other waits for it in its groups first."""
    trainer = Trainer(rank, order=order)
    for _ in range(4 if what == "reduce_scatter" else 0):  # so that the next one is predicted, and starts at once
        finish(what, begin(what, rank))
    trainer.run(3)
    if rank.rank == 0:
        begun = begin(what, rank)
        trainer.step()
        trainer.loss().backward()
        finish(what, begun)
        trainer.optimizer.step()
    else:
        time.sleep(0.5)  # the other has begun, and is in a group with this one
        trainer.run(4)
        trainer.sync.wait()
        finish(what, begin(what, rank))
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()


def body_waits_later(rank: Rank) -> None:
    rank.init()
    kinds = ("message", "messages", "partial", "reduce_scatter", "limited", "polled")
    for order, what in itertools.product(ORDERS, kinds):
        with row(order, what):
            check_waiting_later(rank, order, what)
    for order in ORDERS:
        with row(order, "asked for under a collective"):
            check_asking_meanwhile(rank, order)


def test_what_was_begun_before_a_step_is_waited_for_after_it() -> None:
    run_ranks(body_waits_later, 2, deadline=120)


def check_other_orders(rank: Rank, generator: str, order: str) -> None:
    models = [Trainer(rank, generator=generator, order=order, seed=seed) for seed in range(MODELS)]
    chance = random.Random(rank.rank)
    for step in range(STEPS):
        # DDP's own collective calls in the first two steps stand in one order.
        turns = range(MODELS) if step < 3 else chance.sample(range(MODELS), MODELS)
        for turn in turns:
            time.sleep(0.0 if step < 3 else chance.choice(PAUSES))
            models[turn].step()
    averages = 0
    for model in models:
        model.sync.synchronize()
        averages += model.sync.stats()["averages"]
    for model in models:
        equal_everywhere(model.module)
        model.sync.detach()
    dist.barrier()
    assert averages > 0


def body_other_orders(rank: Rank) -> None:
    rank.init(timeout=20)
    for generator, order in (("random", "atc"), ("smart", "cta")):
        with row(generator, order):
            check_other_orders(rank, generator, order)


def test_in_other_orders_on_other_ranks() -> None:
    run_ranks(body_other_orders, 4, deadline=120)


# ---- on_peer_failure="continue" ----


def attached(group: dist.ProcessGroup) -> Any:
    """The DDP model, its optimizer, its synchronizer."""
    ddp = DistributedDataParallel(mlp(), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    return ddp, optimizer, torchext.attach(ddp, optimizer, on_peer_failure="continue")


def body_each_goes_on(rank: Rank, backend: str) -> list[Any]:
    rank.init(backend)
    models = [attached(new_group(backend)) for _ in range(2)]
    for step in range(60):
        if step == 20 and rank.rank == 1:
            rank.report("dies")
            rank.pause()
        for ddp, optimizer, _ in models:
            optimizer.zero_grad()
            ddp(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
    for _, _, sync in models:
        sync.synchronize()
    return [(sync.stats()["workers"], sync.stats()["lost_ranks"]) for _, _, sync in models]


@pytest.mark.parametrize("backend", slow_on(["prague", "dssync", "hop"], "dssync"))
def test_models_with_groups_of_their_own_go_on(backend: str) -> None:
    with launch(body_each_goes_on, 4, backend) as ranks:
        ranks.expect("dies", [1], deadline=60)
        ranks.kill(1)
        for outcome in ranks.outcomes([0, 2, 3], deadline=60):
            assert outcome.value == [(3, [1])] * 2, outcome.message
