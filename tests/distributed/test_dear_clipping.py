"""Gradients changed after the backward pass, with "dear": it counts or raises, under plain all-reduce as otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, run_ranks
from sharded import EXACT, FORMS, PHASES, SIZES, Branches, Pair, in_form, in_forms, made, mlp, sgd
from torch import nn


def clipped_doubles(rank: Rank, fallback: bool) -> float:
    pair = Pair(rank, made(mlp, torch.float64), sgd, fallback=fallback)
    pair.losses()[0].backward()
    for refused in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"max_norm must be 0 or more, got {refused}"):
            pair.sync.clip_grad_norm_(refused)
    norm = pair.sync.clip_grad_norm_(1e-3)
    # What it has left, of the slices of all ranks.
    left = torch.zeros((), dtype=torch.float64)
    for parameter in stepped(pair):
        left += parameter.grad.square().sum()
    if not pair.sync._core.replicated and pair.sync.stats()["mode"] == "dear":
        dist.all_reduce(left)
    expected = 1e-3 * norm / (norm + 1e-6)
    assert norm.dtype == torch.float64
    return abs(float(left.sqrt() / expected) - 1)


def body_clipped_doubles(rank: Rank) -> dict[str, float]:
    return {f"{fallback=}": clipped_doubles(rank, fallback) for fallback in PHASES}


@pytest.mark.parametrize("size", SIZES)
def test_clipping_keeps_the_precision_of_doubles(size: int) -> None:
    for worst in run_ranks(in_forms, size, body_clipped_doubles):
        assert max(worst.values()) < 1e-12, worst


def stepped(pair: Pair) -> list[Any]:
    return [parameter for group in pair.optimizer.param_groups for parameter in group["params"]]


def clip_by_torch(pair: Pair) -> None:
    pair.losses()[0].backward()
    nn.utils.clip_grad_norm_(pair.module.parameters(), 1e-3)
    pair.optimizer.step()


def clip_values_by_torch(pair: Pair) -> None:
    pair.losses()[0].backward()
    nn.utils.clip_grad_value_(pair.module.parameters(), 1e-4)
    pair.optimizer.step()


def clip_before_reading(pair: Pair) -> None:
    """What asks for the averaged gradients first is not the step."""
    pair.losses()[0].backward()
    nn.utils.clip_grad_norm_(pair.module.parameters(), 1e-3)
    assert all(parameter.grad is not None for parameter in stepped(pair))
    pair.optimizer.step()


def clip_in_closure(pair: Pair) -> None:
    def closure() -> torch.Tensor:
        pair.optimizer.zero_grad()
        loss = pair.losses()[0]
        loss.backward()
        nn.utils.clip_grad_norm_(pair.module.parameters(), 1e-3)
        return loss

    pair.optimizer.step(closure)


def clip_unscaled(pair: Pair) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(pair.losses()[0]).backward()
    scaler.unscale_(pair.optimizer)
    nn.utils.clip_grad_norm_(pair.module.parameters(), 1e-3)
    scaler.step(pair.optimizer)


def clip_slices(pair: Pair) -> None:
    pair.losses()[0].backward()
    nn.utils.clip_grad_norm_(stepped(pair), 1e-3)


def drop_one_gradient(pair: Pair) -> None:
    pair.losses()[0].backward()
    pair.module[4].weight.grad = None
    pair.optimizer.step()


def drop_all_gradients(pair: Pair) -> None:
    pair.losses()[0].backward()
    pair.module.zero_grad()
    pair.optimizer.step()


def drop_in_closure(pair: Pair) -> None:
    def closure() -> torch.Tensor:
        pair.optimizer.zero_grad()
        loss = pair.losses()[0]
        loss.backward()
        pair.module.zero_grad()
        return loss

    pair.optimizer.step(closure)


def replace_gradients(pair: Pair) -> None:
    pair.losses()[0].backward()
    for parameter in pair.module.parameters():
        parameter.grad = parameter.grad * 0.1
    pair.optimizer.step()


def replace_in_the_same_memory(pair: Pair) -> None:
    """What the allocator may do, too."""
    pair.losses()[0].backward()
    for parameter in pair.module.parameters():
        parameter.grad = parameter.grad.detach()
    pair.optimizer.step()


def give_one_a_gradient(pair: Pair) -> None:
    pair.module[4].bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    pair.losses()[0].backward()
    pair.module[4].bias.grad = torch.ones(4)
    pair.optimizer.step()


def body_refused(rank: Rank, fallback: bool, misuse: Callable[[Pair], None]) -> tuple[str, str, float]:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, fallback=fallback)
    outcome = elapsed_error(lambda: misuse(pair))  # in the first step
    assert pair.sync.stats()["mode"] == ("allreduce" if fallback else "dear")
    return outcome


DROPPED = ("was dropped after the backward pass", "drop all of them with optimizer.zero_grad()")
REPLACED = ("was replaced after the backward pass", "change others through optimizer.param_groups")
CHANGED = ("was changed after the backward pass", "clip with sync.clip_grad_norm_()")


@pytest.mark.parametrize("fallback", PHASES)
@pytest.mark.parametrize(
    ("form", "misuse", "text"),
    [
        *((form, clip_by_torch, CHANGED) for form in FORMS),
        *((form, clip_values_by_torch, CHANGED) for form in FORMS),
        *((form, clip_before_reading, CHANGED) for form in FORMS),
        *((form, clip_in_closure, CHANGED) for form in FORMS),
        ("sharded", clip_unscaled, CHANGED),
        ("sharded", clip_slices, ("norm of this rank's slices alone", "clip with sync.clip_grad_norm_()")),
    ],
)
def test_clipping_by_torch_raises_in_the_first_step(
    form: str, misuse: Callable[[Pair], None], text: tuple[str, str], fallback: bool
) -> None:
    for kind, message, seconds in run_ranks(in_form, 2, form, body_refused, fallback, misuse):
        assert kind == "RuntimeError" and all(part in message for part in text), (kind, message)
        assert seconds < 10


@pytest.mark.parametrize("fallback", PHASES)
@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (drop_one_gradient, DROPPED),
        (drop_all_gradients, DROPPED),
        (drop_in_closure, DROPPED),
        (replace_gradients, REPLACED),
        (replace_in_the_same_memory, REPLACED),
        (give_one_a_gradient, REPLACED),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_dropped_or_replaced_raise_in_the_first_step(
    form: str, misuse: Callable[[Pair], None], text: tuple[str, str], fallback: bool
) -> None:
    for kind, message, _ in run_ranks(in_form, 2, form, body_refused, fallback, misuse):
        assert kind == "RuntimeError" and all(part in message for part in text), (kind, message)


def model_zero_grad(pair: Pair) -> None:
    """Where it drops nothing that would be stepped with: at the beginning, and of a batch that is left out."""
    pair.losses(pair.steps + 1000)[0].backward()
    pair.module.zero_grad()
    pair.twin.zero_grad()
    pair.backward()


def clip_what_is_stepped(pair: Pair) -> None:
    pair.backward()
    nn.utils.clip_grad_norm_(stepped(pair), 0.05)
    nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.05)


def change_values(pair: Pair) -> None:
    """Element by element: the same for slices."""
    pair.backward()
    nn.utils.clip_grad_value_(stepped(pair), 0.01)
    nn.utils.clip_grad_value_(pair.twin.parameters(), 0.01)


def drop_one(pair: Pair) -> None:
    pair.backward()
    stepped(pair)[0].grad = None
    next(pair.twin.parameters()).grad = None


def clip_two_batches(pair: Pair) -> None:
    with pair.ddp.no_sync():
        pair.backward()
    pair.steps += 100
    pair.backward()
    pair.steps -= 100
    pair.clip(0.05)


CHANGES: list[tuple[Callable[[Pair], None], str]] = [
    *((change, "") for change in (change_values, drop_one, model_zero_grad, clip_two_batches)),
    *((change_values, ddp) for ddp in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")),
]


def body_changed(rank: Rank) -> dict[str, float]:
    found = {}
    of_whole_gradients = [] if Pair.form == "sharded" else [(clip_what_is_stepped, "")]
    for (change, ddp), fallback in itertools.product(CHANGES + of_whole_gradients, PHASES):
        kind = Branches if ddp == "find_unused_parameters" else mlp
        pair = Pair(rank, made(kind), sgd, fallback=fallback, **({ddp: True} if ddp else {}))
        for _ in range(4):
            pair.zero_grad()
            change(pair)
            pair.update()
        found[f"{change.__name__} {ddp} {fallback=}"] = pair.done()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_what_is_done_through_the_optimizer_counts_in_every_step(size: int) -> None:
    for worst in run_ranks(in_forms, size, body_changed):
        assert max(worst.values()) < EXACT, worst


def body_clipped_after_unscaling(rank: Rank) -> dict[str, float]:
    """In the replicated form gradients are whole once they are unscaled, and the parameters' own."""
    rank.init("dear")
    found = {}
    for fallback in PHASES:
        pair = Pair(rank, made(mlp), sgd, fallback=fallback)

        def clip(pair: Pair = pair) -> None:
            for module in (pair.module, pair.twin):
                nn.utils.clip_grad_norm_(module.parameters(), 0.3)

        pair.run_scaled(clip)
        found[f"{fallback=}"] = pair.done()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_gradients_that_have_been_gathered_are_clipped_by_torch(size: int) -> None:
    for worst in run_ranks(in_form, size, "replicated", body_clipped_after_unscaling):
        assert max(worst.values()) < EXACT, worst
