"""Where tests of adaptive embeddings run the second of two equal modules, and when the two are equal.

A device is a GPU where one is visible, and anywhere a simulated one: it runs the CUDA operators' own code, from tensors
to the passes of the kernels, with loops in the place of launches (tests/cpp/simulated_cuda, compiled here).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adaptive_tables import close
from torch import Tensor
from torch.utils import cpp_extension

from torchext.nn import adaptive_lookup, adaptive_table, chunk_storage, operators, shared_budget

ROOT = Path(__file__).resolve().parent.parent.parent.parent
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")


class SimulatedOps:
    """torch.ops.torchext, with the kernels that the simulated device has registered."""

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(torch.ops.torchext, name).default.redispatch, self.keys)


class Device:
    """Where the second of two equal modules runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The module that is on the device is used in here."""
        if self.name == "cuda":
            yield
            return
        with pytest.MonkeyPatch.context() as patch:
            for module in (adaptive_lookup, operators, shared_budget, chunk_storage, adaptive_table):
                patch.setattr(module, "_ops", SimulatedOps())
            yield

    def put(self, thing: Any) -> Any:
        """A copy on the device."""
        if isinstance(thing, torch.nn.Module):
            thing = copy.deepcopy(thing)
        elif isinstance(thing, Tensor):
            thing = thing.detach().clone().requires_grad_(thing.requires_grad)
        return thing.to("cuda") if self.name == "cuda" and thing is not None else thing


def load_simulated(folder: Path) -> None:
    """Compiles the simulated device's kernels into `folder` and registers them, once a process."""
    here = ROOT / "tests" / "cpp" / "simulated_cuda"
    compiled, built = folder / "simulated.o", folder / "simulated.so"
    folders = [here, ROOT, ROOT / "csrc", *cpp_extension.include_paths()]
    libraries = Path(torch.__file__).parent / "lib"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    # Each process of pytest compiles for itself, for half a minute: ccache knows what another has compiled.
    launcher = ["ccache"] if shutil.which("ccache") and Path(compiler[0]).name != "ccache" else []
    _call(
        *(*launcher, *compiler, "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w"),
        *(f"-I{folder}" for folder in folders),
        *("-c", str(here / "simulated.cpp"), "-o", str(compiled)),
    )
    _call(
        *(*compiler, "-shared", str(compiled), "-o", str(built)),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"),
    )
    torch.ops.load_library(str(built))


def _call(*command: str) -> None:
    environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def same(ours: Tensor, expected: Tensor) -> None:
    """To rounding."""
    close(ours.detach().cpu(), expected.detach())


def same_tables(ours: Any, expected: Any) -> None:
    same(ours.pool, expected.pool)
    assert torch.equal(ours.index.cpu(), expected.index)
    assert torch.equal(ours.seen.cpu(), expected.seen)
    assert torch.equal(ours.clock, expected.clock)
    for state, other in zip(ours.state, expected.state, strict=True):
        same(state, other)
    utility = ours.utility.cpu()
    if len(ours.sketch):  # what is rounded otherwise may leave a cell to another key
        cells = len(ours.sketch)
        equal = ours.sketch.cpu() == expected.sketch
        assert float(equal.double().mean()) > 0.9
        utility, other = utility[:-cells], expected.utility[:-cells]
        assert not len(utility) or int((utility.int() - other.int()).abs().max()) <= 1
    elif utility.dtype == torch.uint8 and len(utility):  # what is rounded otherwise may have the next code
        assert int((utility.int() - expected.utility.int()).abs().max()) <= 1
    else:
        same(utility, expected.utility)
