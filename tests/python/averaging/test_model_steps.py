"""When a step of a model begins and when it is over, told by its optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchext.decentralized.model_steps import ModelSteps


class Model:
    """A regression whose layers have an optimizer each, or share one."""

    def __init__(self, optimizers: int = 1) -> None:
        self.log: list[str] = []
        self.refused = False
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        held: list[Any] = [self.module] if optimizers == 1 else list(self.module)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in held]
        tell: Any = self  # as its buffers
        self.steps = ModelSteps(
            self.module, self.optimizers, tell, self.check, lambda: self.note("begin"), lambda: self.note("end")
        )

    def note(self, what: str) -> None:
        self.log.append(what)

    def restore(self) -> None:
        self.note("restore")

    def check(self) -> None:
        self.note("check")
        if self.refused:
            raise RuntimeError("inside averaged()")

    def loss(self) -> torch.Tensor:
        self.note("pass")
        loss: torch.Tensor = self.module(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    def told(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_one_optimizer() -> None:
    model = Model()
    model.loss()
    model.optimizers[0].step()
    assert model.told() == ["pass", "restore", "check", "begin", "restore", "end"]
    assert not model.steps.inside
    model.steps.close()
    assert model.told() == []


def test_a_step_begins_behind_its_closure() -> None:
    model = Model()
    model.optimizers[0].step(model.loss)
    assert model.told() == ["check", "pass", "restore", "check", "begin", "restore", "end"]


class Unasking(torch.optim.SGD):
    """One that takes a closure and does not call it."""

    __module__ = "torch.optim.unasking"  # torch's own, as a rule, call theirs first

    def step(self, closure: Any = None) -> Any:
        return super().step()


def test_a_step_whose_closure_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "SGD", Unasking)
    model = Model()
    model.optimizers[0].step(model.loss)
    assert model.told() == ["check", "restore", "check", "begin", "restore", "end"]


def test_a_step_that_is_refused() -> None:
    model = Model()
    model.refused = True
    for closure in ([], [model.loss]):
        with pytest.raises(RuntimeError, match="inside averaged"):
            model.optimizers[0].step(*closure)
        assert model.told()[-1] == "check"


def test_a_step_is_over_with_the_last_of_several() -> None:
    model = Model(optimizers=2)
    model.loss()
    for optimizer in model.optimizers:
        optimizer.step()
    assert [what for what in model.told() if what in ("begin", "end")] == ["begin", "end"]


def test_the_next_forward_pass_ends_a_step_without_one_of_several() -> None:
    model = Model(optimizers=2)
    model.loss()
    model.optimizers[0].step()
    with torch.no_grad():
        model.module(torch.ones(1, 2))  # an evaluation, before the other one steps
    assert "end" not in model.told()
    model.loss()
    assert model.told() == ["pass", "end"]


def test_nothing_is_told_once_they_are_removed() -> None:
    model = Model(optimizers=2)
    model.steps.remove()
    model.loss()
    for optimizer in model.optimizers:
        optimizer.step()
    assert model.told() == ["pass"]
