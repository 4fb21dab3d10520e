"""``python -m torchext`` where torchext cannot be imported: it says why, and what there is."""

from __future__ import annotations

import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchext

pytestmark = pytest.mark.long

NATIVE = [f"{name}{importlib.machinery.EXTENSION_SUFFIXES[0]}" for name in ("_C", "_kernels")]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the package as it is in the sources, nothing built."""
    here = Path(torchext.__file__).parent
    unbuilt = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "_build_info.json")
    shutil.copytree(here, tmp_path / "site" / "torchext", ignore=unbuilt)
    return tmp_path / "site"


def record(site: Path, version: str) -> None:
    """Leaves the record of a build for this version of torch."""
    told = Path(torchext.__file__).with_name("_build_info.json").read_text()
    (site / "torchext" / "_build_info.json").write_text(json.dumps({**json.loads(told), "torch": version}))


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def failed(done: subprocess.CompletedProcess[str]) -> str:
    """What is wrong, as it was said."""
    assert done.returncode == 1, done
    assert done.stdout.startswith(f"torchext      {torchext.__version__}\n"), done
    assert f"torch         {torch.__version__}" in done.stdout, done
    head, _, reason = done.stderr.partition("FAILED: ")
    assert "Traceback" not in head + reason, done
    assert "pip install --no-build-isolation" in reason, done
    return reason


def test_not_built(site: Path) -> None:
    assert "was not built" in failed(run(site, "-m", "torchext"))


def test_built_for_another_torch(site: Path) -> None:
    record(site, "2.12.1+cpu")
    for name in NATIVE:
        (site / "torchext" / name).write_bytes(b"must not be loaded")
    done = run(site, "-m", "torchext", "--no-self-test")
    assert "built for torch 2.12.1+cpu" in failed(done)
    assert "(built for 2.12.1+cpu)" in done.stdout
    assert "must not be loaded" not in done.stderr


def test_a_module_is_missing(site: Path) -> None:
    record(site, torch.__version__)
    assert "torchext._C cannot be loaded" in failed(run(site, "-mtorchext"))


def test_others_that_import_it_get_the_error(site: Path) -> None:
    (site / "user.py").write_text("import torchext\n")
    for arguments in (("-m", "user", "torchext"), ("-c", "import torchext", "-m", "torchext")):
        done = run(site, *arguments)
        assert done.returncode == 1
        assert "ImportError: torchext is imported from" in done.stderr
        assert "FAILED" not in done.stderr
