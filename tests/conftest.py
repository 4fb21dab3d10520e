"""What every test starts from: the installed package, one thread, a clean environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    # Tests run against the installed package. Python puts the current folder on the path under `python -m pytest`, and
    # the source folder's torchext (unbuilt, unless installed with -e) would be imported instead.
    if not list((ROOT / "torchext").glob("_C.*.so")):
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


@pytest.fixture(autouse=True)
def _no_leftover_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the rendezvous or the switches of the shell (or of another test)."""
    for name in list(os.environ):
        if name.startswith("TORCHEXT_") or name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}:
            monkeypatch.delenv(name)
    yield
