"""Hooks that a script has on its optimizer's step, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from sharded import FORMS, Pair, batch, in_form, made, mlp, sgd
from torch import nn

EXACT = 1e-5


class Hooked(Pair):
    """Both optimizers have a hook after the step, called with their model; ours since before torchext.attach."""

    def __init__(self, rank: Rank, hook: Callable[[nn.Module, torch.optim.Optimizer], None], **options: Any) -> None:
        models: dict[torch.optim.Optimizer, nn.Module] = {}

        def hooked(parameters: Any) -> torch.optim.Optimizer:
            optimizer = sgd(parameters)
            optimizer.register_step_post_hook(lambda *_: hook(models[optimizer], optimizer))
            return optimizer

        super().__init__(rank, made(mlp), hooked, **options)
        models |= {self.optimizer: self.ddp, self.plain: self.twin}


def body_reading(rank: Rank, fallback: bool) -> float:
    rank.init("dear")
    seen: list[list[torch.Tensor]] = []

    def look(module: nn.Module, _: torch.optim.Optimizer) -> None:
        seen.append([parameter.detach().clone() for parameter in module.parameters()])

    pair = Hooked(rank, look, fallback=fallback).run(5)
    apart = [(a - b).abs().max() for i in range(0, 10, 2) for a, b in zip(*seen[i : i + 2], strict=True)]
    assert len(seen) == 10
    return max(float(max(apart)), pair.done())


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_hook_sees_what_the_step_has_made(form: str, fallback: bool) -> None:
    assert max(run_ranks(in_form, 2, form, body_reading, fallback)) < EXACT


def body_writing(rank: Rank, fallback: bool) -> float:
    rank.init("dear")

    def clamp(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.1, 0.1)

    return Hooked(rank, clamp, fallback=fallback).run(8).done()


@pytest.mark.parametrize("fallback", [False, True])
def test_what_a_hook_writes_is_gathered(fallback: bool) -> None:
    assert max(run_ranks(body_writing, 2, fallback)) < EXACT


def body_evaluating(rank: Rank) -> tuple[str, float]:
    rank.init("dear")

    def evaluate(module: nn.Module, _: torch.optim.Optimizer) -> None:
        with torch.inference_mode():
            module(batch(1000, 1)[0])

    pair = Hooked(rank, evaluate, fallback=True)
    modes = ""
    for _ in range(60):
        pair.step()
        modes += str(pair.sync.stats()["mode"])[0]
    return modes, pair.done()


@pytest.mark.parametrize("form", FORMS)
def test_a_hook_that_evaluates_while_plans_change(form: str) -> None:
    """State is cut and put together again in the hook, in inference mode; later steps change it."""
    for modes, worst in run_ranks(in_form, 2, form, body_evaluating):
        assert "ad" in modes
        assert worst < EXACT
