"""Two backward passes before a step that both average, with "dear": what is done to gradients between them."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import Rank, run_ranks
from sharded import EXACT, SIZES, Branches, Pair, batch, check_within, each_in_ways, made, mlp, sgd
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.sanitize


def clip(pair: Pair, max_norm: float = 0.01) -> None:
    assert pair.clip(max_norm) < EXACT


def scale(pair: Pair) -> None:
    for optimizer in (pair.optimizer, pair.plain):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.01)


def measure(pair: Pair) -> None:
    clip(pair, float("inf"))


def clip_what_has_been_read(pair: Pair) -> None:
    assert all(parameter.grad is not None for group in pair.optimizer.param_groups for parameter in group["params"])
    clip(pair)


def body_taken(rank: Rank) -> dict[str, float]:
    """Changes that count."""
    found = {}
    cases = itertools.product((measure, clip, scale, clip_what_has_been_read), ("", "gradient_as_bucket_view"))
    for change, ddp in cases:
        pair = Pair(rank, made(mlp), sgd, **({ddp: True} if ddp else {}))
        for _ in range(5):
            pair.zero_grad()
            pair.backward()
            change(pair)
            pair.steps += 1
            pair.backward()
            clip(pair)
            pair.update()
        found[f"{change.__name__} {ddp}"] = pair.done()
    return found


def by_the_optimizer(pair: Pair) -> None:
    pair.zero_grad()
    pair.backward()


def by_the_optimizer_with_zeros(pair: Pair) -> None:
    pair.zero_grad(set_to_none=False)
    pair.backward()


def by_the_model(pair: Pair) -> None:
    pair.ddp.zero_grad()
    pair.twin.zero_grad()
    pair.backward()


def by_the_model_with_zeros(pair: Pair) -> None:
    pair.ddp.zero_grad(set_to_none=False)
    pair.twin.zero_grad(set_to_none=False)
    pair.backward()


def after_the_forward_pass(pair: Pair) -> None:
    losses = pair.losses()
    pair.zero_grad()
    for loss in losses:
        loss.backward()


def body_skipped(rank: Rank) -> dict[str, float]:
    """A step is skipped; then gradients are cleared, and the next ones are those of the next batch."""
    worst = {}
    for start in (
        *(by_the_optimizer, by_the_optimizer_with_zeros),
        *(by_the_model, by_the_model_with_zeros, after_the_forward_pass),
    ):
        pair = Pair(rank, made(mlp), sgd)
        for step in range(6):
            start(pair)
            clip(pair)
            if step % 2 == 0:
                pair.ddp(torch.ones(2, 16))  # changes nothing
            if step % 3:
                pair.update()
            else:
                pair.steps += 1
        worst[start.__name__] = pair.done()
    return worst


BODIES = [body_taken, body_skipped]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_done_between_passes(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES):
        check_within(worst)


def nothing(_: Pair) -> None:
    pass


def read(pair: Pair) -> None:
    for group in pair.optimizer.param_groups:
        for parameter in group["params"]:
            assert parameter.grad is None or parameter.grad.isfinite().all()


def scale_what_is_used(pair: Pair) -> None:
    for optimizer in (pair.optimizer, pair.plain):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.01)


def read_and_clear(pair: Pair) -> None:
    read(pair)
    pair.zero_grad()


def read_and_clear_by_the_model(pair: Pair) -> None:
    read(pair)
    pair.ddp.zero_grad()
    pair.twin.zero_grad()


def read_and_drop_one(pair: Pair) -> None:
    """One that only some ranks have a gradient of."""
    read(pair)
    for optimizer in (pair.optimizer, pair.plain):
        optimizer.param_groups[0]["params"][0].grad = None


BETWEEN = (nothing, read, scale_what_is_used, read_and_clear, read_and_clear_by_the_model, read_and_drop_one)


def body_branches(rank: Rank) -> dict[str, float]:
    """Ranks use different branches: each lacks the gradients of one."""
    worst = {}
    for between in BETWEEN:
        pair = Pair(rank, made(Branches), sgd, find_unused_parameters=True)

        def backward(pair: Pair = pair) -> None:
            pair.module.choice = rank.rank
            pair.losses()[0].backward()
            inputs, targets = batch(pair.steps, rank.size)
            for part in range(rank.size):
                pair.twin.choice = part
                rows = slice(part, None, rank.size)
                (cross_entropy(pair.twin(inputs[rows]), targets[rows]) / rank.size).backward()

        for _ in range(5):
            pair.zero_grad()
            backward()
            between(pair)
            pair.steps += 1
            backward()
            pair.update()
        worst[between.__name__] = pair.done()
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_gradients_that_some_ranks_lack_in_the_replicated_form(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, [body_branches], ["replicated"]):
        check_within(worst)
