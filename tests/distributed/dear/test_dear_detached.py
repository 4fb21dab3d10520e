"""Gradients that are there when a model of "dear" is detached: what plain DDP has then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside_ddp import DEAR, Script, apart
from harness import Rank, run_ranks
from torch import nn

pytestmark = pytest.mark.sanitize

FIRST = ["backward", "backward, clipped", "step", "step, zeroed", "step, one thrown away"]


def detached(script: Script, first: str) -> torch.Tensor:
    """A pass, perhaps a step with it, detach, and a step of the optimizer alone with what is there."""
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 4))
    script.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    script.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        script.ddp(script.inputs()).square().mean().backward()
        if "clipped" in first:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if "step" in first:
            optimizer.step()
    if "zeroed" in first:
        optimizer.zero_grad(set_to_none=False)
    if "thrown" in first and script.rank == 0:
        model[0].weight.grad = None
    if script.sync is not None:
        script.sync.detach()
        script.sync = None
    if "thrown" in first:
        model[0].weight.grad = None
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return torch.cat([*gradients, *(p.detach().flatten() for p in model.parameters())])


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("form", DEAR)
def test_gradients_are_those_of_plain_ddp(form: str, first: str) -> None:
    assert max(run_ranks(apart, 2, form, detached, first)) < 1e-6


def body_changed(rank: Rank, form: str) -> Any:
    rank.init("gloo")
    script = Script(rank, form)
    model = nn.Linear(16, 4)
    script.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    script.attach(optimizer)
    script.ddp(script.inputs()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    script.sync.detach()
    return [p.grad is None for p in model.parameters()]


def test_a_lost_change_is_not_taken_for_the_gradient() -> None:
    assert run_ranks(body_changed, 2, "dear-sharded") == [[True, True]] * 2
    assert run_ranks(body_changed, 2, "dear-replicated") == [[False, False]] * 2
