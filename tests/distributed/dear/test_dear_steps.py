"""A step with "dear" needs averaged gradients: else it raises, whatever the phase."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import Rank, run_ranks
from sharded import PHASES, SIZES, Pair, check_within, each_in_ways, made, mlp, sgd

pytestmark = pytest.mark.sanitize


def again(pair: Pair) -> None:
    pair.step()
    pair.optimizer.step()


def again_with_a_closure(pair: Pair) -> None:
    pair.step()
    pair.optimizer.step(lambda: torch.zeros(()))


def inside_no_sync(pair: Pair) -> None:
    with pair.ddp.no_sync():
        pair.backward()
    pair.optimizer.step()


def inside_no_sync_and_zeroed_late(pair: Pair) -> None:
    with pair.ddp.no_sync():
        loss = pair.losses()[0]
        pair.zero_grad()
        loss.backward()
    pair.optimizer.step()


def inside_no_sync_on_top(pair: Pair) -> None:
    pair.step()
    with pair.ddp.no_sync():
        pair.backward()
    pair.optimizer.step()


def inside_no_sync_after_another(pair: Pair) -> None:
    pair.backward()
    with pair.ddp.no_sync():
        pair.backward()
    pair.optimizer.step()


AGAIN = (again, again_with_a_closure)  # in the replicated form the averaged gradients are still there
REFUSED = (inside_no_sync, inside_no_sync_and_zeroed_late, inside_no_sync_on_top, inside_no_sync_after_another)


def body_refused(rank: Rank) -> dict[str, float]:
    """Steps without new averaged gradients."""
    found = {}
    for misuse in REFUSED if Pair.form == "replicated" else (*AGAIN, *REFUSED):
        for fallback in PHASES:
            for steps in (0, 2):
                pair = Pair(rank, made(mlp), sgd, fallback=fallback).run(steps)
                assert pair.sync.stats()["mode"] == ("allreduce" if fallback and rank.size > 1 else "dear")
                pair.zero_grad()
                with pytest.raises(RuntimeError) as error:
                    misuse(pair)
                pair.zero_grad()  # the way out
                name, message = f"{misuse.__name__} {fallback} {steps}", str(error.value)
                assert "optimizer.step() has no averaged gradients" in message, (name, message)
                assert "call optimizer.zero_grad() after each step" in message, (name, message)
                found[name] = pair.run(2).done()
    return found


def after_clearing(pair: Pair) -> None:
    pair.step()
    pair.zero_grad()
    pair.update()


def with_zeros(pair: Pair) -> None:
    """What has momentum moves."""
    pair.step()
    pair.zero_grad(set_to_none=False)
    pair.update()


def with_dropped_zeros(pair: Pair) -> None:
    pair.backward()
    pair.zero_grad(set_to_none=False)
    pair.update()


def twice(pair: Pair) -> None:
    pair.step()
    pair.update()


def gradients_of_inputs(pair: Pair) -> None:
    """Nothing comes to the parameters: what was averaged before still counts."""
    pair.zero_grad()
    pair.backward()
    inputs = torch.rand(4, 16, requires_grad=True)
    with pair.ddp.no_sync():
        torch.autograd.grad(pair.ddp(inputs).sum(), inputs)
    pair.update()


def accumulated(pair: Pair) -> None:
    """The last pass averages what came before, too."""
    pair.zero_grad()
    with pair.ddp.no_sync():
        pair.backward()
    pair.steps += 1
    pair.backward()
    pair.update()


def closures_one_after_the_other(pair: Pair) -> None:
    def closure(ours: bool) -> torch.Tensor:
        (pair.optimizer if ours else pair.plain).zero_grad()
        loss = pair.losses()[0 if ours else 1]
        loss.backward()
        return loss

    for _ in range(2):
        pair.optimizer.step(lambda: closure(True))
        pair.plain.step(lambda: closure(False))
        pair.steps += 1


TAKEN = (
    *(with_zeros, with_dropped_zeros, after_clearing, gradients_of_inputs, accumulated),
    closures_one_after_the_other,
)


def body_taken(rank: Rank) -> dict[str, float]:
    """Steps that are those of single-process training."""
    found = {}
    taken = (*TAKEN, twice) if Pair.form == "replicated" else TAKEN  # the other refuses it: AGAIN
    for step, fallback in itertools.product(taken, PHASES):
        pair = Pair(rank, made(mlp), sgd, fallback=fallback)
        for _ in range(3):
            step(pair)
        found[f"{step.__name__} {fallback=}"] = pair.run(2).done()
    return found


BODIES = [body_refused, body_taken]


@pytest.mark.parametrize("size", SIZES)
def test_steps(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES, deadline=120):
        check_within(worst)
