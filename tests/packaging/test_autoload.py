"""Backend names appear without importing torchext, and no damage to torchext ever reaches ``import torch``."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

import pytest
from interpreter import Python

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
GROUP_OF_ONE = """
import tempfile, torch, torch.distributed as dist
store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("prague", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [1, 1, 1]
assert dist.get_backend() == "prague"
dist.destroy_process_group()
"""


def test_the_name_is_there_without_importing_torchext(python: Python) -> None:
    python("-c", "import torch.distributed as dist; assert dist.is_backend_available('prague')")
    python("-c", "import sys, torch; assert 'torchext' not in sys.modules")


def test_a_group_is_created_without_importing_torchext(python: Python) -> None:
    python("-c", GROUP_OF_ONE)


def test_without_autoload_torch_finds_the_name_or_the_import_registers_it(python: Python) -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    python("-c", "import torchext" + GROUP_OF_ONE, env=off)
    python(
        "-c",
        """
import torch.distributed as dist
knows_entry_points = hasattr(dist.Backend, "_ensure_backend_registered")  # torch 2.15
assert dist.is_backend_available("prague") == knows_entry_points
""",
        env=off,
    )


@pytest.mark.parametrize(
    "before",
    [
        "import torchext; torchext.register(); torchext.register()",
        "import _torchext_autoload as a; a.register(); a.register(); import torchext; a.register()",
        "import torchext, _torchext_autoload as a; torchext.register(); a.register()",
    ],
)
def test_registering_again_is_harmless(python: Python, before: str) -> None:
    python("-W", "error::RuntimeWarning", "-c", before + GROUP_OF_ONE * 2)


def test_both_lists_of_names_agree(python: Python) -> None:
    python(
        "-c",
        """
import _torchext_autoload, torchext.backends
from importlib.metadata import entry_points
names = sorted(torchext.backends.BACKENDS)
assert sorted(_torchext_autoload.BACKENDS) == names
assert sorted(point.name for point in entry_points(group="torch.distributed.backends")
              if point.module == "_torchext_autoload") == names
""",
    )


@pytest.mark.parametrize("kept", [0, 100, 0.5, None], ids=["empty", "100 bytes", "half", "missing"])
def test_a_broken_native_module_never_breaks_torch(python: Python, site: Path, kept: float | None) -> None:
    module = site / "torchext" / f"_C{SUFFIX}"
    content = module.read_bytes()
    module.unlink()
    if kept is not None:
        module.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    python("-W", "error", "-c", "import torch, torch.distributed as dist; dist.is_backend_available('prague')")
    if kept != 0.5:  # the loader may crash on half a file
        done = python("-c", GROUP_OF_ONE, check=False)
        assert done.returncode != 0
        assert "ImportError" in done.stderr
        assert "_C" in done.stderr.splitlines()[-1] or "--no-build-isolation" in done.stderr


def test_a_package_that_cannot_be_imported_never_breaks_torch(python: Python, site: Path) -> None:
    (site / "torchext" / "__init__.py").write_text("raise SystemError('broken on purpose')")
    python("-c", "import torch; print(torch.ones(1).sum().item())")
    done = python("-c", GROUP_OF_ONE, check=False)
    assert "broken on purpose" in done.stderr


def test_registration_that_fails_is_a_warning(python: Python) -> None:
    code = """
import torch, _torchext_autoload, torch.distributed as dist, warnings
dist.Backend._plugins.pop("PRAGUE")
dist.Backend.register_backend = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    _torchext_autoload.register()
assert "torchext could not register" in str(caught[-1].message), caught
"""
    python("-c", code)
