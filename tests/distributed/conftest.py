"""Lets the tests of this folder import the package and the harness beside them, and chooses the slow cases."""

from __future__ import annotations

import collections
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, *(path for path in HERE.iterdir() if path.is_dir()), HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from case_choice import combinations_only  # noqa: E402

# Minutes each: begun first, so that no process of pytest is left alone with them in the end.
LONG = ("test_upstream_suite.py", "test_demo.py")


@pytest.hookimpl(tryfirst=True)  # before "not slow" is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, otherwise in order; combinations that show no new value of a parameter are slow.

    pytest hands over the items of all folders that it collects; those of others stay as they are.
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    functions = collections.defaultdict[tuple[Path, str], list[pytest.Function]](list)
    for item in items:
        if HERE not in item.path.parents:
            continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            functions[item.path, item.originalname].append(item)
    for cases in functions.values():
        for case in combinations_only(cases):
            case.add_marker(pytest.mark.slow)
