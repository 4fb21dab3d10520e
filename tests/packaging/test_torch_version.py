"""A torch other than the one of the build is an error with its remedy, before any native code is loaded."""

from __future__ import annotations

import importlib.machinery
import json
from pathlib import Path

import pytest
import torch
from interpreter import Python

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.fixture
def built_for_another(site: Path) -> str:
    """Makes the package one built for another torch. Native code is gone: loading it would be another error."""
    record = site / "torchext" / "_build_info.json"
    info = json.loads(record.read_text())
    info["torch"] = "2.12.1+cpu"
    record.write_text(json.dumps(info))
    for name in ("_C", "_kernels"):
        (site / "torchext" / f"{name}{SUFFIX}").write_bytes(b"must not be loaded")
    return "2.12.1+cpu"


@pytest.mark.parametrize("arguments", [("-c", "import torchext"), ("-m", "torchext")], ids=["import", "python -m"])
def test_names_both_versions_and_the_way_out(
    python: Python, built_for_another: str, arguments: tuple[str, str]
) -> None:
    done = python(*arguments, check=False)
    assert done.returncode != 0
    for part in (
        f"built for torch {built_for_another}",
        f"torch {torch.__version__} is running",
        "pip install --no-build-isolation",
        "pip install --force-reinstall 'torch==2.12.1' --index-url https://download.pytorch.org/whl/cpu",
    ):
        assert part in done.stderr
    assert "must not be loaded" not in done.stderr
    assert "invalid ELF header" not in done.stderr
    assert ("Traceback" in done.stderr) == (arguments[0] == "-c")


def test_torch_itself_still_imports(python: Python, built_for_another: str) -> None:
    python("-W", "error", "-c", "import torch, torch.distributed as dist; dist.is_backend_available('prague')")


def test_not_built_at_all(python: Python, site: Path) -> None:
    (site / "torchext" / "_build_info.json").unlink()
    done = python("-c", "import torchext", check=False)
    assert "was not built" in done.stderr
    assert "pip install --no-build-isolation" in done.stderr
