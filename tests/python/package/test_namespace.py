"""What ``import torchext`` alone gives."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import torchext

assert "torchext.optim" not in sys.modules
assert "optim" in dir(torchext)
print(torchext.optim.SPDKFAC.__name__, torchext.nn.ChunkPruner.__name__)
assert torchext.optim is sys.modules["torchext.optim"]
try:
    torchext.optimiser
except AttributeError as error:
    print(error)
"""


def test_parts_are_there_without_imports_of_their_own() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["SPDKFAC ChunkPruner", "module 'torchext' has no attribute 'optimiser'"]


def test_import_leaves_the_compiler_alone() -> None:
    code = (
        "import sys, torchext; torchext.optim; print(*{'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()
