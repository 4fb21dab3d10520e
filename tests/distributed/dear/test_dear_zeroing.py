"""Gradients that a script sets to zero by hand, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from largest import largest
from sharded import PHASES, SIZES, Pair, adamw, check_within, each_in_ways, made, mlp, sgd
from torch import nn

pytestmark = pytest.mark.sanitize


def zero(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


def zero_by_hand(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        zero(group["params"])


def at_the_start(pair: Pair) -> None:
    zero_by_hand(pair.optimizer)
    zero_by_hand(pair.plain)
    pair.backward()
    pair.update()


def at_the_end(pair: Pair) -> None:
    pair.backward()
    pair.update()
    zero_by_hand(pair.optimizer)
    zero_by_hand(pair.plain)


def behind_the_forward_pass(pair: Pair) -> None:
    losses = pair.losses()
    zero_by_hand(pair.optimizer)
    zero_by_hand(pair.plain)
    for loss in losses:
        loss.backward()
    pair.update()


def before_two_batches(pair: Pair) -> None:
    zero_by_hand(pair.optimizer)
    zero_by_hand(pair.plain)
    with pair.ddp.no_sync():
        pair.backward()
    pair.steps += 100
    pair.backward()
    pair.steps -= 100
    pair.sync.clip_grad_norm_(0.05)
    nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.05)
    pair.update()


def after_others_have(pair: Pair) -> None:
    pair.zero_grad(set_to_none=False)
    at_the_start(pair)


def after_a_batch_that_is_left_out(pair: Pair) -> None:
    pair.backward()
    pair.steps += 1
    at_the_start(pair)


def before_a_forward_pass_alone(pair: Pair) -> None:
    """The step is with zeros, and moves what has momentum."""
    at_the_end(pair)
    pair.backward()
    zero_by_hand(pair.optimizer)
    zero_by_hand(pair.plain)
    pair.losses()
    pair.update()


STEPS = [
    *(at_the_start, at_the_end, behind_the_forward_pass, before_two_batches, after_others_have),
    *(after_a_batch_that_is_left_out, before_a_forward_pass_alone),
]


def body_by_hand(rank: Rank) -> dict[str, float]:
    worst = {}
    for step in STEPS:
        for fallback in PHASES:
            pair = Pair(rank, made(mlp), sgd, fallback=fallback)
            for _ in range(4):
                step(pair)
            worst[f"{step.__name__} {fallback}"] = pair.done()
    return worst


def skipped(rank: Rank, at_the_end: bool) -> float:
    """Gradients are those of a step that a scaler has skipped: they have been averaged, and are not stepped with."""
    pair = Pair(rank, made(mlp), sgd)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    scales = []
    for step in range(8):
        factor = float("inf") if step in (0, 3, 4) else 1.0
        optimizers = (pair.optimizer, pair.plain)
        if not at_the_end:
            for optimizer in optimizers:
                zero_by_hand(optimizer)
        for scaler, optimizer, loss in zip(scalers, optimizers, pair.losses(), strict=True):
            scaler.scale(factor * loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if at_the_end:
            for optimizer in optimizers:
                zero_by_hand(optimizer)
        pair.steps += 1
        scales.append(scalers[0].get_scale())
    assert scales == [2.0**9] * 3 + [2.0**8] + [2.0**7] * 4
    return pair.done()


def body_skipped(rank: Rank) -> dict[str, float]:
    return {f"{at_the_end=}": skipped(rank, at_the_end) for at_the_end in (False, True)}


def in_a_hook(rank: Rank, clear: Callable[[torch.optim.Optimizer], None], before: bool) -> float:
    """A hook after the step that was there before torchext.attach, or one that came later."""

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(lambda *_: clear(optimizer))
        return optimizer

    worst = 0.0
    for fallback in PHASES:
        pair = Pair(rank, made(mlp), hooked if before else adamw, fallback=fallback)
        if not before:
            for optimizer in (pair.optimizer, pair.plain):
                optimizer.register_step_post_hook(lambda optimizer, *_: clear(optimizer))
        for _ in range(5):
            pair.backward()
            pair.update()
        worst = largest(worst, pair.done())
    return worst


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def body_in_a_hook(rank: Rank) -> dict[str, float]:
    cases = itertools.product((zero_by_hand, zero_grad), (True, False))
    return {f"{clear.__name__} {before=}": in_a_hook(rank, clear, before) for clear, before in cases}


def body_by_a_list(rank: Rank) -> dict[str, float]:
    """The model's own parameters, which nobody is asked for."""
    found = {}
    for fallback in PHASES:
        pair = Pair(rank, made(mlp), sgd, fallback=fallback)
        own, whole = list(pair.module.parameters()), list(pair.twin.parameters())
        for _ in range(6):
            pair.backward()
            pair.update()
            zero(own)
            zero(whole)
        found[f"{fallback=}"] = pair.done()
    return found


BODIES = [body_by_hand, body_skipped, body_in_a_hook, body_by_a_list]


@pytest.mark.parametrize("size", SIZES)
def test_zeroed(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES):
        check_within(worst)


def body_by_reference(rank: Rank) -> None:
    """Gradients that were read before the step, which the replicated form has not done."""
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, form="replicated")
    pair.run(2)
    pair.zero_grad()
    pair.backward()
    gradients = [parameter.grad for parameter in pair.module.parameters()]
    pair.update()
    for gradient in gradients:
        gradient.zero_()
    with pytest.raises(RuntimeError, match=r"was changed between optimizer.step\(\) and .* sync.wait\(\)"):
        pair.losses()


def test_of_references_to_gradients_whose_step_is_not_done() -> None:
    run_ranks(body_by_reference, 2)
