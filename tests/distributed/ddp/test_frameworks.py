"""What training frameworks do with a model and an optimizer: wrappers around the optimizer, training in a closure.

None of them need be installed: these are the shapes of their wrappers (Lightning 2.6, Accelerate 1.15).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attached import Trainer, batch, equal_everywhere, flat, mlp, new_group
from harness import Rank, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

STEPS = 6
EXACT = 1e-6


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Does not call its base class's constructor, so that it has no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class LightningOptimizer:
    """Passes for an optimizer of the class that it wraps, has its hooks, and calls its ``step()`` past its own.

    Its other methods are those of the class, with the wrapper for ``self``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type("Lightning" + kind.__name__, (LightningOptimizer, kind), {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optimizer.step() if closure is None else self._optimizer.step(closure=closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def body_wrapped(rank: Rank, backend: str, wrapper: Callable[[Any], Any]) -> None:
    rank.init()
    trained = []
    for wrapped in (False, True):
        options = {"allreduce_fallback": False} if backend == "dear" else {}
        group = new_group(backend, **options)
        ddp = DistributedDataParallel(mlp(), process_group=group)
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        used = wrapper(optimizer) if wrapped else optimizer
        sync = torchext.attach(ddp, used)
        for step in range(STEPS):
            used.zero_grad()
            inputs, targets = batch(rank.rank, step)
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            used.step()
        sync.synchronize()
        assert sync.stats()["steps"] == STEPS
        equal_everywhere(ddp.module)
        trained.append(flat(ddp.module))
        sync.detach()
        assert "step" not in optimizer.__dict__
    if backend != "prague":  # whose groups are those that happen to be ready
        torch.testing.assert_close(*trained)


@pytest.mark.parametrize("wrapper", [AcceleratedOptimizer, LightningOptimizer])
@pytest.mark.parametrize("backend", ["dear", "dssync", "hop", "prague"])
def test_a_wrapped_optimizer(backend: str, wrapper: Callable[[Any], Any]) -> None:
    run_ranks(body_wrapped, 2, backend, wrapper)


def body_closure(rank: Rank, backend: str) -> None:
    """Frameworks make the gradients inside ``step(closure)``; the average hides under them as without a closure."""
    rank.init()
    trained = []
    for inside in (False, True):
        trainer = Trainer(rank, backend=backend)
        seen = []

        def train(trainer: Trainer = trainer, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            trainer.optimizer.zero_grad()
            seen.append(flat(trainer.module))  # what the forward pass starts from
            loss = trainer.loss()
            loss.backward()
            return loss

        for _ in range(STEPS):
            if inside:
                trainer.optimizer.step(train)
            else:
                train()
                trainer.optimizer.step()
            trainer.step_count += 1
        trainer.sync.synchronize()
        assert trainer.sync.stats()["steps"] == STEPS
        trained.append(torch.stack([*seen, flat(trainer.module)]))
        trainer.sync.detach()
    torch.testing.assert_close(*trained, rtol=0, atol=EXACT)


@pytest.mark.parametrize("backend", ["dssync", "hop"])
def test_training_in_a_closure(backend: str) -> None:
    run_ranks(body_closure, 2, backend)


class Forgetful(torch.optim.SGD):
    """Does not call its closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


def body_closures(rank: Rank, backend: str) -> None:
    rank.init()
    for kind, calls in ((Forgetful, 0), (torch.optim.LBFGS, 2)):
        ddp = DistributedDataParallel(mlp(), process_group=new_group(backend))
        optimizer = kind(ddp.parameters(), lr=0.01)
        sync = torchext.attach(ddp, optimizer)
        called = 0

        def closure(ddp: nn.Module = ddp, optimizer: Any = optimizer) -> torch.Tensor:
            nonlocal called
            called += 1
            optimizer.zero_grad()
            inputs, targets = batch(rank.rank, 0)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        assert (called > 3) == (calls > 1)
        assert sync.stats()["steps"] == 3
        sync.synchronize()
        equal_everywhere(ddp.module)
        sync.detach()


@pytest.mark.parametrize("backend", ["dssync", "hop", "prague"])
def test_closures_called_never_or_often(backend: str) -> None:
    run_ranks(body_closures, 2, backend)
