"""The wheel under test, and interpreters that see it and nothing else of torchext."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from interpreter import Python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make install` left in dist/, or one built now."""
    found = sorted((ROOT / "dist").glob("torchext-*.whl"))
    if not found:
        folder = tmp_path_factory.mktemp("dist")
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", folder, ROOT]
        subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)
        found = sorted(folder.glob("torchext-*.whl"))
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """A folder with the installed package in it, for one test to damage."""
    folder = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def python(site: Path, tmp_path: Path) -> Python:
    """Runs code in a fresh interpreter that finds torchext in `site` first."""

    def run(*arguments: str, env: dict[str, str] | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(site), **(env or {})},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert not check or done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
