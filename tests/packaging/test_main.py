"""``python -m torchext``."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

import torch
from interpreter import Python

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def test_summary_and_self_test(python: Python) -> None:
    output = python("-m", "torchext").stdout
    for part in (torch.__version__, "CUDA kernels", "compiler", "init_process_group", "all_reduce", "torchext works."):
        assert part in output
    assert "partial_all_reduce" in output


def test_no_self_test(python: Python) -> None:
    output = python("-m", "torchext", "--no-self-test").stdout
    assert "torchext works." in output
    assert "self-test" not in output


def test_a_missing_kernel_module_is_a_failure(python: Python, site: Path) -> None:
    (site / "torchext" / f"_kernels{SUFFIX}").unlink()
    done = python("-m", "torchext", check=False)
    assert done.returncode == 1
    assert "FAILED: torchext._kernels cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install --no-build-isolation" in done.stderr


def test_a_failing_self_test_is_a_failure(python: Python, site: Path) -> None:
    source = site / "torchext" / "selftest.py"
    source.write_text(
        source.read_text().replace('_expect("all_reduce", tensor, 3.0)', '_expect("all_reduce", tensor, 4.0)')
    )
    done = python("-m", "torchext", check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stderr
    assert "all_reduce: expected 4.0 everywhere, got 3.0 to 3.0" in done.stderr
