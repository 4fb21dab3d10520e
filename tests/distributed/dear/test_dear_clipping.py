"""Gradients changed after the backward pass, with "dear": it counts, under plain all-reduce as otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from sharded import PHASES, SIZES, SIZES_WITH_EMPTY_PARTS, Branches, Pair, check_within, in_forms, made, mlp, sgd
from torch import nn


def clipped_doubles(rank: Rank, fallback: bool) -> float:
    pair = Pair(rank, made(mlp, torch.float64), sgd, fallback=fallback)
    pair.losses()[0].backward()
    for refused in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"max_norm must be 0 or more, got {refused}"):
            pair.sync.clip_grad_norm_(refused)
    norm = pair.sync.clip_grad_norm_(1e-3)
    left = torch.zeros((), dtype=torch.float64)  # of what it has left
    for parameter in stepped(pair):
        left += parameter.grad.square().sum()
    expected = 1e-3 * norm / (norm + 1e-6)
    assert norm.dtype == torch.float64
    return abs(float(left.sqrt() / expected) - 1)


def body_clipped_doubles(rank: Rank) -> dict[str, float]:
    return {f"{fallback=}": clipped_doubles(rank, fallback) for fallback in PHASES}


@pytest.mark.parametrize("size", SIZES_WITH_EMPTY_PARTS)
def test_clipping_keeps_the_precision_of_doubles(size: int) -> None:
    for worst in run_ranks(in_forms, size, body_clipped_doubles):
        check_within(worst, 1e-12)


def stepped(pair: Pair) -> list[Any]:
    return [parameter for group in pair.optimizer.param_groups for parameter in group["params"]]


Train = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]], None]
"""A step of a model by an optimizer, with what gives the loss of its next forward pass."""


def clip_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def clip_to_the_largest(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"), foreach=True)
    optimizer.step()


def clip_values_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    optimizer.step()


def clip_what_is_stepped_by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    loss().backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-3)
    optimizer.step()


def clip_in_closure(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return found

    optimizer.step(closure)  # type: ignore[arg-type]


def clip_unscaled(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)


def drop_one_gradient(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    model[4].weight.grad = None  # type: ignore[index]
    optimizer.step()


def drop_all_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    model.zero_grad()
    optimizer.step()


def drop_in_closure(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    def closure() -> torch.Tensor:
        found = loss()
        found.backward()
        model.zero_grad()
        return found

    optimizer.step(closure)  # type: ignore[arg-type]


def replace_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.1
    optimizer.step()


def replace_in_the_same_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    """What the allocator may do, too."""
    loss().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach()
    optimizer.step()


def give_one_a_gradient(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    bias: nn.Parameter = model[4].bias  # type: ignore[index, assignment]
    handle = bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    loss().backward()
    handle.remove()
    bias.grad = torch.ones(4)
    optimizer.step()


def read_twice(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """What has been read before is still the gradient when others have been gathered."""
    loss().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is not None and parameter.grad is not None
        gradient.mul_(parameter.grad.abs().gt(0.01))
        gradient.add_(parameter.detach(), alpha=0.1)
    optimizer.step()


TRAIN: list[Train] = [
    *(clip_by_torch, clip_to_the_largest, clip_values_by_torch, clip_what_is_stepped_by_torch, clip_in_closure),
    *(clip_unscaled, drop_one_gradient, drop_all_gradients, drop_in_closure, replace_gradients),
    *(replace_in_the_same_memory, give_one_a_gradient, read_twice),
]


def body_by_scripts(rank: Rank) -> dict[str, float]:
    found = {}
    for train, fallback in itertools.product(TRAIN, PHASES):
        pair = Pair(rank, made(mlp), sgd, fallback=fallback)
        for _ in range(3):
            pair.zero_grad()
            train(pair.module, pair.optimizer, lambda pair=pair: pair.losses()[0])  # type: ignore[misc]
            train(pair.twin, pair.plain, lambda pair=pair: pair.losses()[1])  # type: ignore[misc]
            pair.steps += 1
        assert pair.sync.stats()["mode"] == ("allreduce" if fallback and rank.size > 1 else "dear")
        found[f"{train.__name__} {fallback=}"] = pair.done()
    return found


@pytest.mark.parametrize("size", SIZES_WITH_EMPTY_PARTS)
def test_what_scripts_do_to_gradients_counts(size: int) -> None:
    for worst in run_ranks(in_forms, size, body_by_scripts, deadline=120):
        check_within(worst)


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
        check_within(worst)
