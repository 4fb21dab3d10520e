"""Lets the tests of this folder import the package, what stands beside them and the harness of tests/distributed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "distributed", HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Files in the order in which they begin: those that take longest first, for two run at a time.
LONGEST_FIRST = ["test_ray.py", "test_lightning.py", "test_transformers.py", "test_run.py", "test_accelerate.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests of this folder and leaves others where they are."""
    order = {HERE / name: number for number, name in enumerate(LONGEST_FIRST)}
    ours = iter(sorted((item for item in items if item.path in order), key=lambda item: order[item.path]))
    items[:] = [next(ours) if item.path in order else item for item in items]
