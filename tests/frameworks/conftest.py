"""Lets the tests of this folder import the package, what stands beside them and the harness of tests/distributed."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "distributed", HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
