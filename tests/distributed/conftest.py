"""Lets the tests of this folder import the package from a source checkout and the harness beside them."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, *(path for path in HERE.iterdir() if path.is_dir()), HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Minutes each: begun first, so that no process of pytest is left alone with them in the end.
LONG = ("test_upstream_suite.py", "test_demo.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stable: within a file, and behind the long ones, the order stays."""
    items.sort(key=lambda item: item.path.name not in LONG)
