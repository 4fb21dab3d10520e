"""What is in the wheel, and what must not be."""

from __future__ import annotations

import importlib.machinery
import json
import runpy
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
# Beside the package: what must be importable without it.
MODULES = {"_torchext_autoload.py", "_torchext_lightning.py", "torchext_warm.py"}


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def metadata(wheel: Path) -> Message:
    (name,) = [name for name in names_in(wheel) if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(read(wheel, name))


def test_holds_native_modules_types_and_record(wheel: Path) -> None:
    names = names_in(wheel)
    for needed in (f"_C{SUFFIX}", f"_kernels{SUFFIX}", "_C.pyi", "py.typed", "_build_info.json", "__init__.py"):
        assert f"torchext/{needed}" in names
    assert set(names) >= MODULES


def test_holds_every_module_of_the_source_and_nothing_else(wheel: Path) -> None:
    packaged = {name for name in names_in(wheel) if name.endswith((".py", ".pyi"))}
    package = ROOT / "torchext"
    source = {str(path.relative_to(ROOT)) for path in package.rglob("*.py*") if path.suffix in {".py", ".pyi"}}
    assert packaged == source | MODULES
    leaked = (".cpp", ".cc", ".h", ".cu", ".cuh", ".o", ".ninja", ".sh")
    assert [name for name in names_in(wheel) if name.endswith(leaked)] == []
    top = {name.split("/")[0] for name in names_in(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {"torchext"} | MODULES


def test_has_the_version_of_the_source(wheel: Path) -> None:
    version = runpy.run_path(str(ROOT / "torchext" / "_version.py"))["__version__"]
    assert metadata(wheel)["Version"] == version


def test_needs_the_torch_it_was_built_with_and_no_pybind11(wheel: Path) -> None:
    needed = metadata(wheel).get_all("Requires-Dist") or []
    assert f"torch=={torch.__version__.split('+')[0]}" in needed
    assert not any("pybind11" in requirement for requirement in needed)
    assert '"pybind11' not in (ROOT / "pyproject.toml").read_text()


def test_record_says_what_was_built_without_dates_and_paths(wheel: Path) -> None:
    text = read(wheel, "torchext/_build_info.json").decode()
    info = json.loads(text)
    assert info["torch"] == torch.__version__
    assert isinstance(info["cuda"], bool)
    assert info["cuda_reason"]
    assert bool(info["arch_list"]) == info["cuda"]
    assert not any(str(value).startswith("/") for value in info.values())
    assert str(ROOT) not in text


def test_native_modules_name_no_folder_of_the_build(wheel: Path) -> None:
    for module in ("_C", "_kernels"):
        content = read(wheel, f"torchext/{module}{SUFFIX}")
        for folder in (ROOT, Path(torch.__file__).parent):
            assert f"{folder}/".encode() not in content, f"{module} names {folder}"


def test_installs_in_a_virtual_environment(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, stdin=subprocess.DEVNULL)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # torch is 5 GB: borrowed from the environment that runs the tests.
    Path(where, "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    done = subprocess.run(
        [python, "-c", "import torchext; print(torchext.__file__, torchext.__version__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.split() == [str(Path(where, "torchext", "__init__.py")), metadata(wheel)["Version"]]
