"""How the build decides about CUDA and compilers: loud when it cannot do what it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tools; at the end, so that torchext stays the installed one

from tools import build_config  # noqa: E402
from tools.build_config import BuildError, decide_cuda  # noqa: E402


def setup_py(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA toolkit of the version written to its file `version`."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release $(cat {tmp_path}/version), V0\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build_config.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    return tmp_path / "version"


@pytest.mark.parametrize("value", ["yes", "", "2", "Auto"])
def test_a_bad_value_names_the_values(value: str) -> None:
    with pytest.raises(BuildError, match=f"TORCHEXT_CUDA='{value}' is not one of auto, 1, 0"):
        decide_cuda(value)


def test_a_bad_value_stops_the_build() -> None:
    done = setup_py(TORCHEXT_CUDA="maybe")
    assert done.returncode != 0
    assert "TORCHEXT_CUDA='maybe' is not one of auto, 1, 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build")
def test_asked_for_without_nvcc_stops_the_build(tmp_path: Path) -> None:
    done = setup_py(TORCHEXT_CUDA="1", CUDA_HOME=str(tmp_path))
    assert done.returncode != 0
    assert f"no nvcc in CUDA_HOME={tmp_path}" in done.stderr
    major = str(torch.version.cuda).split(".")[0]
    assert f"the CUDA toolkit {major}.x (with nvcc)" in done.stderr
    assert "TORCHEXT_CUDA=0" in done.stderr
    assert "Traceback" not in done.stderr


def test_auto_without_nvcc_builds_for_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    for home in (str(tmp_path), None):
        monkeypatch.setattr(build_config.cpp_extension, "CUDA_HOME", home)
        decision = decide_cuda("auto")
        assert not decision.enabled
        assert "toolkit 13.x" in decision.reason


def test_another_minor_is_fine_another_major_is_not(toolkit: Path) -> None:
    toolkit.write_text("13.0")
    assert decide_cuda("auto").enabled
    assert decide_cuda("1").enabled
    toolkit.write_text("12.9")
    assert not decide_cuda("auto").enabled
    with pytest.raises(BuildError, match=r"the toolkit is 12\.9, torch was built with CUDA 13\.2: the majors differ"):
        decide_cuda("1")


def test_zero_leaves_cuda_out_where_it_could_be_built(toolkit: Path) -> None:
    toolkit.write_text("13.2")
    assert decide_cuda("0") == build_config.CudaDecision(False, "TORCHEXT_CUDA=0")


def test_a_cpu_torch_cannot_have_cuda(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit.write_text("13.2")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a CPU build" in decide_cuda("auto").reason
    with pytest.raises(BuildError, match="Install a CUDA build of torch"):
        decide_cuda("1")


def test_no_gpu_is_asked_for(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise AssertionError("the build looked for a GPU")

    toolkit.write_text("13.2")
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    assert decide_cuda("auto").enabled
    assert build_config.build_info()["arch_list"] == build_config.DEFAULT_ARCH_LIST


def test_launchers_leave_the_compilers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache gcc")
    monkeypatch.setenv("CXX", "ccache g++")
    build_config.drop_launchers()
    assert os.environ["CC"] == "gcc"
    assert os.environ["CXX"].endswith("g++")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"'no-such-compiler' is not on PATH\. On Debian: apt-get install g\+\+"):
        build_config.build_info()
