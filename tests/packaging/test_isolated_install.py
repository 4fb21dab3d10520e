"""``pip install`` of a source distribution into an empty environment, with build isolation: torch is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder, cwd=ROOT)
    (archive,) = folder.glob("torchext-*.tar.gz")
    return archive


def test_source_distribution_holds_what_a_build_needs_and_no_builds(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder, patterns in {"csrc": ("*.cpp", "*.h"), "kernels": ("*.cpp", "*.h", "*.cu"), "tools": ("*.py",)}.items():
        for pattern in patterns:
            needed = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}
            assert needed <= names, sorted(needed - names)
    assert {
        "setup.py",
        "pyproject.toml",
        "_torchext_autoload.py",
        "_torchext_lightning.py",
        "torchext_warm.py",
        "torchext/py.typed",
        "torchext/_C.pyi",
    } <= names
    assert [name for name in names if name.endswith((".so", ".o", "_build_info.json"))] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_installs_with_build_isolation_and_works(sdist: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", sdist, cwd=tmp_path)
    assert "torchext works." in run(python, "-m", "torchext", cwd=tmp_path)
