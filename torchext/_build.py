"""The build's record: what was built, and whether it fits the torch that runs.

Nothing here needs native code: ``check_torch`` is called before any is loaded, because a module compiled against
another torch fails with an undefined symbol at best and with wrong memory at worst.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["BuildInfo", "build_info", "check_torch", "load_native"]

BuildInfo = dict[str, str | bool | None]

_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall <the torchext source folder>"


@cache
def build_info() -> BuildInfo:
    """The record that the build left in the package: torch, CUDA and why, architectures, compiler.

    Raises:
        ImportError: the record is not there, so torchext was never built in this folder.
    """
    path = Path(__file__).with_name("_build_info.json")
    try:
        info: BuildInfo = json.loads(path.read_text())
    except FileNotFoundError:
        raise ImportError(
            f"torchext is imported from {path.parent}, where it was not built. Install it with\n"
            f"  {_REBUILD}\nand start Python outside the source folder."
        ) from None
    return info


def check_torch() -> None:
    """Compares the torch that torchext was compiled against with the running one.

    Raises:
        ImportError: they differ, or torchext was not built; the message has the command that fixes it.
    """
    built = str(build_info()["torch"])
    if built == torch.__version__:
        return
    public, _, local = built.partition("+")
    # pip takes the same version with another local part for installed, and only this index has builds by their parts.
    index = f" --index-url https://download.pytorch.org/whl/{local}" if local else ""
    raise ImportError(
        f"torchext was built for torch {built}, but torch {torch.__version__} is running. Rebuild it with\n"
        f"  {_REBUILD}\nor install the torch it was built for with\n"
        f"  pip install --force-reinstall 'torch=={public}'{index}"
    )


def load_native(name: str) -> ModuleType:
    """Imports ``torchext._C`` or ``torchext._kernels`` after the version check.

    Raises:
        ImportError: another torch, or the file is missing or damaged; the message has the command that fixes it.
    """
    check_torch()
    try:
        return importlib.import_module(f"torchext.{name}")
    except ImportError as error:
        raise ImportError(f"torchext.{name} cannot be loaded: {error}. Rebuild it with\n  {_REBUILD}") from error
