"""The replicated form of "dear" does a step in the next forward pass, but not in the modes of that."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from sharded import SIZES, Pair, adamw, batch, check_within, difference, each_in_ways, made, mlp, sgd
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.sanitize


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """Multiplies matrices, which autocast would do in its own element type."""
    return torch.optim.Adafactor(parameters, lr=0.01)


def autocast(rank: Rank, dtype: torch.dtype) -> float:
    """Two models, of which one is stepped before the forward pass: how far they are apart."""
    pairs = [Pair(rank, made(mlp), adafactor) for _ in range(2)]
    rows = slice(rank.rank, None, rank.size)
    for step in range(6):
        inputs, targets = batch(step, rank.size)
        for pair in pairs:
            pair.zero_grad()
            if pair is pairs[0]:
                pair.sync.wait()
            with torch.autocast("cpu", dtype):
                output = pair.ddp(inputs[rows])
            cross_entropy(output.float(), targets[rows]).backward()
            pair.optimizer.step()
    for pair in pairs:
        pair.sync.wait()
    one, other = (pair.module for pair in pairs)
    assert all(map(torch.equal, one.parameters(), other.parameters())), (dtype, difference(one, other))
    return difference(one, other)


def body_autocast(rank: Rank) -> dict[str, float]:
    """A forward pass under autocast."""
    return {str(dtype): autocast(rank, dtype) for dtype in (torch.float16, torch.bfloat16)}


def body_inference(rank: Rank) -> dict[str, float]:
    """A forward pass in inference mode, right after the first step, which makes the optimizer's state."""
    found = {}
    for optimizer, wrapped in itertools.product((sgd, adamw), (True, False)):
        pair = Pair(rank, made(mlp), optimizer).run(1)
        with torch.inference_mode():
            (pair.ddp if wrapped else pair.module)(batch(9, 2)[0])
        state = pair.optimizer.state.values()
        assert state and not any(value.is_inference() for values in state for value in values.values())
        found[f"{optimizer.__name__} {wrapped=}"] = pair.run(3).done()
    return found


BODIES = [body_autocast, body_inference]


@pytest.mark.parametrize("size", SIZES)
def test_modes_of_the_forward_pass(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES, ["replicated"]):
        check_within(worst)
