"""Hooks that a script has on its optimizer's step, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from largest import largest
from sharded import PHASES, SIZES, Pair, batch, check_within, each_in_ways, made, mlp, sgd
from torch import nn


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


def reading(rank: Rank, fallback: bool) -> float:
    seen: list[list[torch.Tensor]] = []

    def look(module: nn.Module, _: torch.optim.Optimizer) -> None:
        seen.append([parameter.detach().clone() for parameter in module.parameters()])

    pair = Hooked(rank, look, fallback=fallback).run(5)
    apart = [(a - b).abs().max() for i in range(0, 10, 2) for a, b in zip(*seen[i : i + 2], strict=True)]
    assert len(seen) == 10
    return largest(largest(apart), pair.done())


def body_reading(rank: Rank) -> dict[str, float]:
    """A hook sees what the step has made."""
    return {f"{fallback=}": reading(rank, fallback) for fallback in PHASES}


def clamp(parameters: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.clamp_(-0.1, 0.1)


def through_the_model(module: nn.Module, _: torch.optim.Optimizer) -> None:
    clamp(module.parameters())


def through_the_optimizer(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        clamp(group["params"])


def body_writing(rank: Rank) -> dict[str, float]:
    """What a hook writes counts."""
    # The replicated form has not done the step when its hooks are called, but for those that ask the model.
    hooks = (through_the_model, through_the_optimizer)[: 2 if Pair.form == "sharded" else 1]
    cases = itertools.product(hooks, PHASES)
    return {
        f"{hook.__name__} {fallback=}": Hooked(rank, hook, fallback=fallback).run(8).done() for hook, fallback in cases
    }


def body_evaluating(rank: Rank) -> float:
    """A hook evaluates, in inference mode, while plans change."""

    def evaluate(module: nn.Module, _: torch.optim.Optimizer) -> None:
        with torch.inference_mode():
            module(batch(1000, 1)[0])

    pair = Hooked(rank, evaluate, fallback=True)
    modes = ""
    for _ in range(60):
        pair.step()
        modes += str(pair.sync.stats()["mode"])[0]
    assert rank.size == 1 or "ad" in modes  # one rank alone has no all-reduce to try
    return pair.done()


def body_stepping(rank: Rank) -> float:
    """Steps in inference mode, in which state is cut and put together again; later steps, outside of it, change it."""
    pair = Pair(rank, made(mlp), sgd, fallback=True)
    modes = ""
    for step in range(60):
        pair.zero_grad()
        pair.backward()
        with torch.inference_mode(0 < step < 50):
            pair.update()
        modes += str(pair.sync.stats()["mode"])[0]
    assert rank.size == 1 or "ad" in modes[:50]
    return pair.done()


BODIES = [body_reading, body_writing, body_evaluating, body_stepping]


@pytest.mark.parametrize("size", SIZES)
def test_hooks(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES):
        check_within(worst)
