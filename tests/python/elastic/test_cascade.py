"""Which other models go on without somebody when one has lost them, by the facts alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from torchext.elastic import cascade
from torchext.elastic.membership_round import PAUSE, Departed


class Workers:
    """Of one model: what becomes of its group, looked at so many times."""

    def __init__(self, ranks: set[int], *, failed: bool = False, left_at: int | None = None) -> None:
        self.ranks = ranks
        self.has_failed = failed
        self.ended_for: set[int] | None = None
        self._left_at = left_at
        self._looks = 0

    def has(self, ranks: Collection[int]) -> bool:
        return bool(self.ranks & set(ranks))

    def is_left_by(self, ranks: Collection[int]) -> bool:
        assert self.has(ranks)
        self._looks += 1
        return self._left_at is not None and self._looks > self._left_at

    def lose(self, ranks: Collection[int]) -> None:
        if not self.has_failed:
            self.has_failed, self.ended_for = True, set(ranks)


def losing(departed: Departed, *others: Workers) -> list[int]:
    asked: Any = list(others)
    found: Any = cascade.losing(departed, asked)
    return sorted(others.index(other) for other in found)


class Clock:
    """Instead of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "time", Clock())


def gone(dead: set[int], left: set[int] | None = None) -> Departed:
    return Departed(dead=frozenset(dead), left=frozenset(left or ()))


def test_the_dead_are_gone_for_every_model() -> None:
    theirs, others = Workers({0, 1, 2}), Workers({0, 2})
    assert losing(gone({1}), theirs, others) == [0]
    assert theirs.ended_for == {1} and not others.has_failed


def test_whoever_left_one_model_may_train_another() -> None:
    healthy = Workers({0, 1})
    assert losing(gone(set(), {1}), healthy) == []
    assert not healthy.has_failed


def test_a_script_that_ends_leaves_one_model_after_the_other() -> None:
    """The second is left later than is waited for one: the first has been left meanwhile."""
    soon, late = (int(part * cascade.LEAVING / PAUSE) for part in (0.6, 1.4))
    first, second, never = Workers({0, 1}, left_at=soon), Workers({0, 1}, left_at=late), Workers({0, 2})
    assert losing(gone(set(), {1}), never, second, first) == [1, 2]
    assert first.ended_for == second.ended_for == {1}


def test_one_that_is_left_much_later_is_another_matter() -> None:
    later = Workers({0, 1}, left_at=int(1.4 * cascade.LEAVING / PAUSE))
    assert losing(gone(set(), {1}), later) == []
    assert not later.has_failed


def test_what_has_failed_by_itself_goes_on_in_its_turn() -> None:
    failed = Workers({0, 2}, failed=True)
    assert losing(gone({1}), failed) == [0]
    assert failed.ended_for is None


def test_nobody_is_gone_where_newcomers_join() -> None:
    healthy = Workers({0, 1})
    assert losing(gone(set()), healthy) == []
    assert not healthy.has_failed
