"""Which cases of the multi-process tests are quick, that is run by ``make test``; all others are marked slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def quick_on(*names: str) -> list[Any]:
    """All backends, as values of a parameter; those not named are slow, where all share the class under test."""
    from torchext.backends import BACKENDS  # imported with torch, which the process that shares out cases never needs

    assert set(names) <= set(BACKENDS), names
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in sorted(BACKENDS)]


def slow_on(cases: Sequence[Any], *names: str) -> list[Any]:
    """Cases: backends, or tuples that begin with one. Those of these names are slow: others run the class tested."""
    from torchext.backends import BACKENDS

    assert set(names) <= set(BACKENDS), names
    return [
        pytest.param(*values, marks=pytest.mark.slow if values[0] in names else ())
        for values in (case if isinstance(case, tuple) else (case,) for case in cases)
    ]


def combinations_only(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Cases of one function that can be left out so that each value of each parameter still occurs."""
    values = {case: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases}
    missing, left = set().union(*values.values()), list(cases)
    while missing:
        best = max(left, key=lambda case: len(values[case] & missing))
        left.remove(best)
        missing -= values[best]
    return left
