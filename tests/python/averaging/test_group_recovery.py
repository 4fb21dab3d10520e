"""How models go on when their groups fail: what is done again, who else goes on, in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchext.decentralized.group_recovery import GroupRecovery
from torchext.elastic.membership_round import Departed


class Core:
    """The C++ side of one group."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def stats(self) -> dict[str, Any]:
        return {"steps": 2, "group_sizes": {2: 1, self.steps: 3}, "slot_bytes": 8}

    def leave(self, limit: timedelta) -> None:
        assert limit == timedelta(0)


class Workers:
    """The members of a model's groups, in which ranks die."""

    members, lost, joined, seconds = (0, 2), (1,), (), 0.5

    def __init__(self, log: list[str], name: str, ranks: set[int]) -> None:
        self.log, self.name, self.ranks = log, name, ranks
        self.has_failed = self.waiting = False
        self.dead: set[int] = set()
        self.end: dist.DistBackendError | None = None
        self.failing = 0
        """So many of the next groups fail at once."""

    def fail(self, error: BaseException) -> None:
        self.has_failed = True

    def agree(self, error: BaseException) -> Departed:
        return Departed(dead=frozenset(self.dead), left=frozenset())

    def error(self) -> Exception:
        error: Exception = dist.DistBackendError(f"{self.name} has failed")
        return error

    def has(self, ranks: Collection[int]) -> bool:
        return bool(self.ranks & set(ranks))

    def lose(self, ranks: Collection[int]) -> None:
        self.has_failed = True

    def newcomers(self) -> bool:
        came, self.waiting = self.waiting, False
        return came

    def renew(self, error: BaseException, make_core: Callable[[Any], Core]) -> Core:
        assert self.has_failed
        if self.end is not None:
            raise self.end
        self.has_failed = False
        self.log.append(f"{self.name} renews")
        return make_core(None)


class Model:
    """One that is attached, beside others."""

    def __init__(
        self, name: str = "model", ranks: Collection[int] = (0, 1, 2), beside: list[Model] | None = None
    ) -> None:
        others = [] if beside is None else beside
        others.append(self)
        self.log: list[str] = others[0].log if others[0] is not self else []
        self.name, self.core, self.furthest = name, Core(steps=5), 0
        self.workers: Any = Workers(self.log, name, set(ranks))
        core: Any = self.core
        next_core: Any = Core
        self.recovery = GroupRecovery(
            core,
            self.workers,
            lambda _: next_core(),
            (torch.zeros(1),),
            meet=self.meet,
            leave_average=lambda: self.log.append(f"{name} leaves"),
            attached=lambda: [other.recovery for other in others],
        )

    def meet(self, core: Any, steps: int | None, collectives: int) -> int:
        self.core = core
        self.log.append(f"{self.name} meets, of {steps} steps")
        if self.workers.failing:
            self.workers.failing -= 1
            raise dist.DistBackendError("the next one is gone, too")
        return max(self.furthest, collectives)

    def act(self, failures: int = 1) -> list[Core]:
        """What is done with the core, which fails so often; returns those with which it was tried."""
        tried: list[Core] = []

        def action() -> None:
            tried.append(self.core)
            if len(tried) <= failures:
                raise dist.DistBackendError("rank 1 is gone")

        self.recovery.persist(action)
        return tried


def test_what_has_failed_is_done_again_in_another_group() -> None:
    model = Model()
    first, second = model.act()
    assert first is not second and second is model.core
    assert model.log == ["model leaves", "model renews", "model meets, of 5 steps"]
    assert len(model.act(failures=0)) == 1


def test_a_group_that_fails_when_its_workers_meet() -> None:
    model = Model()
    model.workers.failing = 1
    assert len(model.act()) == 2
    assert model.log == ["model leaves", "model renews", "model meets, of 5 steps"] * 2


def test_a_collective_that_the_others_are_past_is_not_done() -> None:
    model = Model()
    tried = []

    def action() -> None:
        tried.append(model.core)
        if len(tried) == 1:
            raise dist.DistBackendError("rank 1 is gone")

    model.furthest = 1
    assert not model.recovery.persist(action, collective=True)
    assert len(tried) == 1
    tried.clear()
    assert model.recovery.persist(action, collective=True)  # the others' next one, too
    assert len(tried) == 2


def test_other_models_of_the_dead_go_on_too_in_the_order_of_attaching() -> None:
    models: list[Model] = []
    first, second = Model("first", {1, 2}, models), Model("second", {0, 1}, models)
    Model("other", {0, 2}, models)
    second.workers.dead = {1}
    second.act()
    assert first.log == [
        *("first leaves", "second leaves", "first renews", "first meets, of 5 steps"),
        *("second renews", "second meets, of 5 steps"),
    ]


def test_what_keeps_another_model_from_going_on_is_raised_when_it_is_used() -> None:
    models: list[Model] = []
    first, second = Model("first", {1, 2}, models), Model("second", {0, 1}, models)
    first.workers.end = dist.DistBackendError("nobody knows who is left")
    second.workers.dead = {1}
    assert len(second.act()) == 2
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="nobody knows who is left"):
            first.act(failures=0)
    second.act()  # and is not asked again
    assert second.log.count("first leaves") == 1


def test_newcomers() -> None:
    model = Model()
    model.recovery.admit_newcomers()
    assert model.log == []
    model.workers.waiting = True
    model.recovery.admit_newcomers()
    assert model.log == ["model leaves", "model renews", "model meets, of 5 steps"]


def test_a_newcomer_has_made_no_step() -> None:
    model = Model()
    model.workers.failing, model.furthest = 1, 7
    model.recovery.enter()
    assert model.log == [
        *("model meets, of None steps", "model leaves", "model renews", "model meets, of None steps"),
    ]


def test_what_earlier_groups_have_counted_is_added() -> None:
    model = Model()
    model.act()
    stats = model.core.stats()
    model.recovery.add_to(stats)
    counted = {"steps": 4, "group_sizes": {0: 3, 2: 2, 5: 3}, "slot_bytes": 8}
    assert stats == counted | {"workers": 2, "lost_ranks": [1], "joined_ranks": [], "recovery_ms": 500.0}
