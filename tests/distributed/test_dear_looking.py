"""Who reads or trains parameters of "dear" by another way than the wrapped model's forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from sharded import FORMS, Pair, adamw, batch, in_form, made, mlp, sgd
from test_dear_features import body_branch_by_rank
from torch import nn

EXACT = 1e-5


def body_averaged(rank: Rank) -> float:
    """Reads what the block yields without asking the model for its parameters."""
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw)
    worst = 0.0
    for _ in range(4):
        pair.step()
        with pair.sync.averaged() as module:
            worst = max(worst, float((module[0].weight - pair.twin[0].weight).abs().max()))  # type: ignore[index]
    return max(worst, pair.done())


@pytest.mark.parametrize("form", FORMS)
def test_averaged_shows_the_last_step(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_averaged)) < EXACT


class Parted(nn.Module):
    """Training calls methods of a part, and one of two branches; the part's own forward pass is another."""

    def __init__(self) -> None:
        super().__init__()
        self.part = mlp()
        self.part.register_parameter("shift", nn.Parameter(torch.zeros(16)))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.part.shift
        for layer in self.part:  # type: ignore[attr-defined]
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


def body_part(rank: Rank) -> float:
    rank.init("dear")
    pair = Pair(rank, made(Parted), adamw)
    worst = 0.0
    inputs = batch(99, 4)[0]
    for _ in range(4):
        pair.step()
        seen = []
        for model in (pair.module, pair.twin):
            part = model.part
            shifts: list[Any] = []
            assert isinstance(part, nn.Module)
            handle = part.register_forward_pre_hook(lambda m, _, shifts=shifts: shifts.append(m.shift.detach().clone()))
            with torch.no_grad():
                seen.append((part(inputs), shifts))
            handle.remove()
        worst = max(worst, float((seen[0][0] - seen[1][0]).abs().max()))
        worst = max(worst, float((seen[0][1][0] - seen[1][1][0]).abs().max()))
    return max(worst, pair.done())


@pytest.mark.parametrize("form", FORMS)
def test_a_part_that_training_does_not_call(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_part)) < EXACT


def compiled_whole() -> nn.Module:
    return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]


def compiled_part() -> nn.Module:
    layers = mlp()
    return nn.Sequential(torch.compile(layers[:2], backend="eager"), *layers[2:])  # type: ignore[index]


def body_compiled(rank: Rank, kind: Callable[[], nn.Module]) -> float:
    rank.init("dear")
    pair = Pair(rank, made(kind), adamw)
    worst = 0.0
    for _ in range(4):
        pair.step()
        with torch.no_grad():
            inputs = batch(99, 4)[0]
            worst = max(worst, float((pair.ddp.module(inputs) - pair.twin(inputs)).abs().max()))
    return max(worst, pair.done())


@pytest.mark.parametrize("kind", [compiled_whole, compiled_part])
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_model_called_without_its_wrapper(form: str, kind: Callable[[], nn.Module]) -> None:
    assert max(run_ranks(in_form, 2, form, body_compiled, kind)) < EXACT


def body_pass_beside(rank: Rank) -> tuple[str, float]:
    """After each step a backward pass of some layers, without the wrapper: its gradients are dropped."""
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, fallback=True, bucket_mb="auto")
    modes = ""
    for _ in range(60):
        pair.step()
        for model in (pair.module, pair.twin):
            model[:3](batch(7, 1)[0]).square().mean().backward()  # type: ignore[index]
        modes += str(pair.sync.stats()["mode"])[0]
    return modes, pair.done()


@pytest.mark.parametrize("form", FORMS)
def test_a_pass_without_the_wrapper_when_the_plan_changes(form: str) -> None:
    for modes, worst in run_ranks(in_form, 2, form, body_pass_beside):
        assert "ad" in modes
        assert worst < EXACT


def body_branches_while_plans_change(rank: Rank) -> float:
    return body_branch_by_rank(rank, steps=80, fallback=True)


def test_branches_by_rank_while_plans_change() -> None:
    """The step that is deferred when the plan turns to all-reduce has gathered gradients."""
    assert max(run_ranks(in_form, 2, "replicated", body_branches_while_plans_change)) < 1e-4
