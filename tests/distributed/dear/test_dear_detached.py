"""Gradients that are there when a model of "dear" is detached: what plain DDP has then."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from beside_ddp import DEAR, Script
from harness import Rank, run_ranks
from largest import largest
from sharded import check_within
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


def body_beside_ddp(rank: Rank) -> dict[str, float]:
    rank.init("gloo")
    worst = {}
    for first in FIRST:
        found = {}
        for kind in (None, *DEAR):
            torch.manual_seed(0)
            found[kind] = detached(Script(rank, kind), first)
        for form in DEAR:
            others = [torch.empty_like(found[form]) for _ in range(rank.size)]
            dist.all_gather(others, found[form])
            apart = [(found[None] - found[form]).abs().max(), (others[0] - others[1]).abs().max()]
            worst[f"{form}, {first}"] = largest(apart)
    return worst


def test_gradients_are_those_of_plain_ddp() -> None:
    for worst in run_ranks(body_beside_ddp, 2):
        check_within(worst, 1e-6)


def lacks_gradients(rank: Rank, form: str) -> list[bool]:
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


def body_changed(rank: Rank) -> dict[str, list[bool]]:
    rank.init("gloo")
    return {form: lacks_gradients(rank, form) for form in ("dear-sharded", "dear-replicated")}


def test_a_lost_change_is_not_taken_for_the_gradient() -> None:
    assert run_ranks(body_changed, 2) == [{"dear-sharded": [True, True], "dear-replicated": [False, False]}] * 2
