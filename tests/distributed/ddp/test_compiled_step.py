"""An optimizer's step under torch.compile ("compiling the optimizer"): what is attached to it takes part as without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attached import Trainer, equal_everywhere, flat
from harness import Rank
from largest import largest
from rows import row_values
from sharded import FORMS, Pair, in_form, made, mlp, sgd

EXACT = 1e-5
STEPS = 8
# Of groups whose averages do not depend on who is ready when.
OPTIONS: dict[str, dict[str, Any]] = {"prague": {"generator": "static", "order": "atc"}, "dssync": {}, "hop": {}}


def compiled_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    torch._dynamo.reset()  # what other rows have compiled
    return torch.compile(lambda: optimizer.step(), backend="eager")


def check_compiled() -> None:
    """Skips the test where the interpreter is one that torch.compile does not support."""
    try:
        torch.compile(lambda: None, backend="eager")
    except RuntimeError as error:
        pytest.skip(str(error))


def body_dear(rank: Rank, fallback: bool, scheduled: bool) -> float:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, fallback=fallback)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        for optimizer in (pair.optimizer, pair.plain)
        if scheduled
    ]
    step = compiled_step(pair.optimizer)
    for _ in range(STEPS):
        pair.zero_grad()
        pair.backward()
        step()
        pair.plain.step()
        for schedule in schedules:
            schedule.step()
        pair.steps += 1
    worst = pair.done()
    assert scheduled or "step" not in pair.optimizer.__dict__  # detach() has put it back
    return worst


def test_dear() -> None:
    check_compiled()
    table = itertools.product(FORMS, [False, True], [False, True])
    rows = {
        f"{form}{', fallback' * fallback}{', scheduled' * scheduled}": (form, body_dear, fallback, scheduled)
        for form, fallback, scheduled in table
    }
    for row, differences in row_values(in_form, 2, rows, deadline=100).items():
        assert largest(differences) < EXACT, row


def body_averaged(rank: Rank, backend: str) -> None:
    rank.init()
    trained = []
    for compiled in (False, True):
        trainer = Trainer(rank, backend=backend, **OPTIONS[backend])
        step = compiled_step(trainer.optimizer) if compiled else trainer.optimizer.step
        for number in range(STEPS):
            trainer.optimizer.zero_grad()
            trainer.loss(number).backward()
            step()
        trainer.sync.synchronize()
        stats = trainer.sync.stats()
        assert stats["steps"] == STEPS
        assert stats["averages"] > 0
        equal_everywhere(trainer.module)
        trained.append(flat(trainer.module))
        trainer.sync.detach()
    torch.testing.assert_close(*trained)


def test_averaged() -> None:
    check_compiled()
    row_values(body_averaged, 2, {backend: (backend,) for backend in OPTIONS}, deadline=100)
