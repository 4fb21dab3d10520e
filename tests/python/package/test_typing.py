"""What a type checker knows of what ``torchext.attach`` and ``torchext.backend_of`` return, and K-FAC's options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchext

pytest.importorskip("mypy")

SCRIPT = """
from typing import Any

import torchext


def train(ddp: Any, optimizer: Any) -> None:
    sync = torchext.attach(ddp, optimizer)
    reveal_type(sync)
    if isinstance(sync, torchext.HopSynchronizer):
        reveal_type(sync.iteration)
    if isinstance(sync, torchext.DearSynchronizer):
        sync.load_optimizer_state_dict(sync.optimizer_state_dict())
        reveal_type(sync.optimizer_state_dict())
    print(sync.iteration)
    backend = torchext.backend_of()
    reveal_type(backend.failure)
    if isinstance(backend, torchext.ProcessGroupDSSync):
        reveal_type(backend.topology)
        reveal_type(backend.options.group_size)
    print(backend.topology)


def make(model: Any) -> None:
    torchext.optim.SPDKFAC(model, lr=0.1, damping=0.01, kl_clip=None)
    torchext.optim.SPDKFAC(model, damping="0.01")
    torchext.optim.PADKFAC(model, dampng=0.01)
"""
# What torch is made of is of no interest here, and takes a minute.
CONFIG = """
[mypy]
strict = True
[mypy-torchext.*]
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
"""


def test_a_script_that_uses_what_one_backend_adds(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    home = Path(torchext.__file__).parents[1]
    path = {} if home.name in ("site-packages", "dist-packages") else {"MYPYPATH": str(home)}
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True, timeout=240, check=False
    )
    said = re.findall(r"^script.py:(\d+): (?:note: Revealed type is \"(.*)\"|error: .* \[(.*)\])$", done.stdout, re.M)
    assert said == [
        ("9", "torchext.ddp.synchronizer.Synchronizer", ""),
        ("11", "int", ""),
        ("14", "dict[str, Any]", ""),
        ("15", "", "attr-defined"),
        ("17", "tuple[int, str]", ""),
        ("19", "dict[str, Any] | None", ""),
        ("20", "int", ""),
        ("21", "", "attr-defined"),
        ("26", "", "arg-type"),
        ("27", "", "call-arg"),
    ], done.stdout + done.stderr
