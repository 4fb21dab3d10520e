"""Which cases are slow: combinations that show no new value, and only those of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from case_choice import combinations_only

ROOT = Path(__file__).resolve().parents[2]


def test_each_value_of_each_parameter_stays() -> None:
    class Case:
        def __init__(self, **params: object) -> None:
            self.callspec = SimpleNamespace(params=params)

    cases = [Case(world=world, device=device, form=form) for world in (2, 3, 4) for device in "ab" for form in "xy"]
    left_out = combinations_only(cases)  # type: ignore[arg-type]
    kept = [case for case in cases if case not in left_out]
    assert len(kept) == 3  # as many as the longest list of values
    for name, values in {"world": {2, 3, 4}, "device": {"a", "b"}, "form": {"x", "y"}}.items():
        assert {case.callspec.params[name] for case in kept} == values


@pytest.mark.parametrize("chosen", ["slow", "not slow"])
def test_cases_of_other_folders_stay_as_they_are(chosen: str) -> None:
    """`tests/python` has many combinations of parameters, which all belong to the quick suite."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", chosen]
    files = ["tests/distributed/test_case_choice.py", "tests/python/kernels/test_kernels.py"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    collected = [line for line in answer.stdout.splitlines() if line.startswith("tests/python/kernels")]
    assert bool(collected) == (chosen == "not slow"), answer.stdout + answer.stderr
