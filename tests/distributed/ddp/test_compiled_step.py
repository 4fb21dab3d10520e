"""An optimizer's step under torch.compile ("compiling the optimizer"): what is attached to it takes part as without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attached import Trainer, equal_everywhere, flat
from harness import Rank, run_ranks
from sharded import FORMS, Pair, in_form, made, mlp, sgd

EXACT = 1e-5
STEPS = 8


def compiled_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
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


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_dear(form: str, fallback: bool, scheduled: bool) -> None:
    check_compiled()
    assert max(run_ranks(in_form, 2, form, body_dear, fallback, scheduled, deadline=100)) < EXACT


def body_averaged(rank: Rank, backend: str) -> None:
    rank.init()
    trained = []
    for compiled in (False, True):
        trainer = Trainer(rank, backend=backend)
        step = compiled_step(trainer.optimizer) if compiled else trainer.optimizer.step
        for number in range(STEPS):
            trainer.optimizer.zero_grad()
            trainer.loss(number).backward()
            step()
        trainer.sync.synchronize()
        stats = trainer.sync.stats()
        assert stats["steps"] == STEPS
        assert backend == "prague" or stats["averages"] > 0
        equal_everywhere(trainer.module)
        trained.append(flat(trainer.module))
        trainer.sync.detach()
    if backend != "prague":  # whose groups are those that happen to be ready
        torch.testing.assert_close(*trained)


@pytest.mark.parametrize("backend", ["prague", "dssync", "hop"])
def test_averaged(backend: str) -> None:
    check_compiled()
    run_ranks(body_averaged, 2, backend, deadline=100)
