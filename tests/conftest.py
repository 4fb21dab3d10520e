"""What every test starts from: the installed package, one thread, a clean environment."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Until all tests are collected: what imports leave is no garbage, and searching it takes a third of their time.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    # Tests run against the installed package. Python puts the current folder on the path under `python -m pytest`, and
    # the source folder's torchext (unbuilt, or built long ago) would be imported instead.
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    if any(Path(entry, "torchext", "_build_info.json").is_file() for entry in others):
        sys.path[:] = others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="of all cases only each N-th")


@pytest.hookimpl(trylast=True)  # of those that markers leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--every")
    if every == 1:
        return
    kept = items[::every]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton reports what is left at the end


@pytest.fixture(autouse=True)
def _no_leftover_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the rendezvous or the switches of the shell (or of another test)."""
    for name in list(os.environ):
        if name.startswith("TORCHEXT_") or name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}:
            monkeypatch.delenv(name)
