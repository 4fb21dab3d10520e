"""An optimizer whose step() calls its parent's: torch runs hooks for both, the synchronizers act once a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from attached import Trainer, equal_everywhere, flat
from harness import Rank
from largest import largest
from rows import row_values

STEPS = 8
DECAY = 0.98


class Decaying(torch.optim.SGD):
    """As many scripts have one: something of its own after the parent's step."""

    elementwise = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(DECAY)
        return loss


class Whole(torch.optim.SGD):
    """The same in one."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                parameter.mul_(DECAY)
        return loss


def body(rank: Rank, backend: str, closure: bool, options: dict[str, Any]) -> float:
    rank.init()
    torch.optim.SGD([torch.zeros(1)])  # from now on torch's wrapper is around the parent's step, too
    made = []
    for optimizer in (Decaying, Whole):
        trainer = Trainer(rank, backend=backend, optimizer=optimizer, **options)

        def passes(trainer: Trainer = trainer) -> torch.Tensor:
            trainer.optimizer.zero_grad()
            loss = trainer.loss()
            loss.backward()
            return loss

        for _ in range(STEPS):
            if closure:
                trainer.optimizer.step(passes)
                trainer.step_count += 1
            else:
                trainer.step()
            if backend == "prague":
                trainer.sync.synchronize()  # under which step an average ends is a matter of time
        trainer.sync.synchronize()
        assert trainer.sync.state_dict()["steps"] == STEPS
        assert backend != "dear" or trainer.sync.stats()["mode"] == "dear"
        equal_everywhere(trainer.module)
        made.append(flat(trainer.module))
        trainer.sync.detach()
    return float((made[0] - made[1]).abs().max())


CASES = {
    "prague-atc": {"order": "atc", "group_size": 2},
    "prague-cta": {"order": "cta", "group_size": 2},
    "dssync": {},
    "hop-parallel": {"order": "parallel"},
    "hop-serial": {"order": "serial"},
    "dear-sharded": {"form": "sharded", "allreduce_fallback": False},
    "dear-replicated": {"form": "replicated", "allreduce_fallback": False},
}


def test_a_step_inside_a_step_is_one_step() -> None:
    table = itertools.product(CASES, [False, True])
    rows = {f"{name}{', closure' * closure}": (name.split("-")[0], closure, CASES[name]) for name, closure in table}
    for row, differences in row_values(body, 2, rows).items():
        assert largest(differences) < 1e-6, row
