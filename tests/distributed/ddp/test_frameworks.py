"""What training frameworks do with a model and an optimizer: wrappers around the optimizer, training in a closure.

None of them need be installed: these are the shapes of their wrappers (Lightning 2.6, Accelerate 1.15).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from attached import Trainer, batch, equal_everywhere, flat, mlp, new_group
from harness import Rank
from rows import row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

STEPS = 6
EXACT = 1e-6
# Of groups whose averages do not depend on who is ready when.
OPTIONS: dict[str, dict[str, Any]] = {
    "dear": {"allreduce_fallback": False},
    "dssync": {},
    "hop": {},
    "prague": {"generator": "static", "order": "atc"},
}


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
        group = new_group(backend, **OPTIONS[backend])
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
    torch.testing.assert_close(*trained)


def test_a_wrapped_optimizer() -> None:
    rows = itertools.product(OPTIONS, [AcceleratedOptimizer, LightningOptimizer])
    row_values(body_wrapped, 2, {f"{backend}, {kind.__name__}": (backend, kind) for backend, kind in rows})


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


def test_training_in_a_closure() -> None:
    row_values(body_closure, 2, {backend: (backend,) for backend in ("dssync", "hop")})


class Forgetful(torch.optim.SGD):
    """Does not call its closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


class Own(torch.optim.LBFGS):
    """Nothing of a class that is not torch's is put off until its closure has been called."""


def drop_closure(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """A hook of the script's, which a step without its closure is left by."""
    return args[:1], {}


def closures(rank: Rank, backend: str, kind: type[torch.optim.Optimizer], way: str) -> tuple[int, torch.Tensor]:
    """How often the closure was called in three steps, and what these made of the model."""
    ddp = DistributedDataParallel(mlp(), process_group=new_group(backend, **OPTIONS[backend]))
    optimizer: Any = kind(ddp.parameters(), lr=0.1)  # type: ignore[call-arg]
    sync = torchext.attach(ddp, optimizer)
    if way == "dropped":
        optimizer.register_step_pre_hook(drop_closure)
    called = 0

    def passes() -> torch.Tensor:
        nonlocal called
        called += 1
        optimizer.zero_grad()
        inputs, targets = batch(rank.rank, 0)
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        return loss

    for step in range(3):
        if way != "called":
            passes()
        optimizer.step(*([] if way == "none" else [passes]))
        assert sync.stats()["steps"] == step + 1
    sync.synchronize()
    equal_everywhere(ddp.module)
    sync.detach()
    return called, flat(ddp.module)


def body_closures(rank: Rank, backend: str) -> None:
    rank.init()
    none, forgotten, dropped = (
        closures(rank, backend, *way)
        for way in ((torch.optim.SGD, "none"), (Forgetful, "forgotten"), (torch.optim.SGD, "dropped"))
    )
    assert none[0] == forgotten[0] == dropped[0] == 3
    torch.testing.assert_close(none[1], forgotten[1], rtol=0, atol=EXACT)  # what was dropped has stepped too early
    torchs, own = (closures(rank, backend, kind, "called") for kind in (torch.optim.LBFGS, Own))
    assert torchs[0] == own[0] > 3
    torch.testing.assert_close(torchs[1], own[1], rtol=0, atol=EXACT)


def test_closures_called_never_or_often() -> None:
    row_values(body_closures, 2, {backend: (backend,) for backend in ("dssync", "hop", "prague")})
