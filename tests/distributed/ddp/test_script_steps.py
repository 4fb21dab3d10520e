"""Steps that are not the plain one: by another optimizer, around moved weights, frozen, interrupted, scheduled."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from beside_ddp import ATTACHED, DEAR, Script, check_apart, check_rows_apart, loss, momentum, wide
from harness import Rank, elapsed_error
from rows import row_values
from torch import nn

# ---- Another optimizer ----


def body_other(rank: Rank, form: str, wrapped: bool) -> tuple[str, str, float]:
    rank.init("gloo")
    script = Script(rank, form)
    script.wrap(wide())
    optimizer = Climbing(script.ddp.parameters(), "copy") if wrapped else momentum(script.ddp.parameters())
    script.attach(optimizer)
    other = optimizer.base if isinstance(optimizer, Climbing) else momentum(script.ddp.parameters())
    strange = momentum(nn.Linear(2, 2).parameters())
    loss(script).backward()
    if not wrapped:
        optimizer.step()
        loss(script).backward()
    strange.step()  # of another model
    return elapsed_error(other.step)


def test_a_step_of_another_optimizer_is_refused() -> None:
    table = itertools.product(["prague", "dssync", "hop", "dear-replicated", "dear"], [False, True])
    rows = {f"{form}{', wrapped' * wrapped}": (form, wrapped) for form, wrapped in table}
    for row, both in row_values(body_other, 2, rows).items():
        for kind, message, seconds in both:
            assert kind == "RuntimeError" and "attached with another optimizer" in message, (row, kind, message)
            assert "sync.detach()" in message and seconds < 10, row


def in_phases(script: Script) -> torch.Tensor:
    """The way out: the old one is detached, and the new one attached."""
    model, results = wide(), []
    for optimizer_kind in (torch.optim.SGD, momentum):
        script.wrap(model)
        optimizer = optimizer_kind(model.parameters())
        script.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss(script).backward()
            optimizer.step()
        results.append(script.result())
    return torch.cat(results)


def test_another_phase_with_another_optimizer() -> None:
    check_apart(ATTACHED, in_phases)


# ---- Sharpness-aware minimization ----


class Climbing(torch.optim.Optimizer):
    """Weights are moved along the gradient, a second pass is taken there, and they are put back before the step."""

    elementwise = True

    def __init__(self, parameters: Any, back: str) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups
        self.back = back

    def _used(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def climb(self) -> None:
        used = self._used()
        norm = torch.stack([p.grad.norm() for p in used]).norm()
        for p in used:
            self.base.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p in self._used():
            old = self.base.state[p]["old"]
            if self.back == "memory":
                p.data = old
            elif self.back == "data":
                p.data.copy_(old)
            else:
                p.copy_(old)
        self.base.step()
        self.base.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def sharpness_aware(script: Script, back: str, local: bool) -> torch.Tensor:
    """``local``: every worker climbs along its own gradient, as the paper has it."""
    script.wrap(wide())
    optimizer = Climbing(script.ddp.parameters(), back)
    script.attach(optimizer.base)
    for _ in range(4):
        with script.ddp.no_sync() if local else contextlib.nullcontext():
            loss(script).backward()
        optimizer.climb()
        loss(script).backward()
        optimizer.descend()
    return script.result()


def test_weights_moved_and_put_back() -> None:
    table = [
        *((form, "memory", True) for form in ATTACHED),
        *((form, back, False) for form in DEAR for back in ("memory", "data", "copy")),
    ]
    rows = {f"{form}, {back}{', local' * local}": (form, sharpness_aware, back, local) for form, back, local in table}
    check_rows_apart(rows)


# ---- Frozen between steps ----


def frozen_later(script: Script, before_the_step: bool) -> torch.Tensor:
    """Torch goes on stepping what has a gradient, frozen or not."""
    model = script.wrap(wide(), find_unused_parameters=True)
    optimizer = momentum(model.parameters())
    script.attach(optimizer)
    for round_ in range(3):
        loss(script).backward()
        if round_ == 0 and before_the_step:
            model.module[0].requires_grad_(False)
        optimizer.step()
        model.module[0].requires_grad_(round_ == 1)
    return script.result()


@pytest.mark.parametrize("before_the_step", [False, True])
def test_frozen_with_a_gradient(before_the_step: bool) -> None:
    check_apart(DEAR, frozen_later, before_the_step)


# ---- Passes that are interrupted ----


def interrupted(script: Script) -> torch.Tensor:
    """KeyboardInterrupt in a forward pass, for which torch calls no forward hooks; the script goes on."""
    model = script.wrap(wide())
    optimizer = momentum(model.parameters())
    script.attach(optimizer)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for round_ in range(4):
        optimizer.zero_grad()
        if round_ == 2:
            handle = model.module[2].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss(script)
            handle.remove()
        loss(script).backward()
        optimizer.step()
    return script.result()


def test_an_interrupted_forward_pass() -> None:
    check_apart(ATTACHED, interrupted)


# ---- What torch says of steps ----


def scheduled(script: Script, early: bool) -> torch.Tensor:
    model = script.wrap(wide())
    optimizer = momentum(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if early else None
        script.attach(optimizer)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(4):
            optimizer.zero_grad()
            loss(script).backward()
            optimizer.step()
            scheduler.step()
        return script.result()


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_does_not_warn(early: bool) -> None:
    check_apart(ATTACHED, scheduled, early)
