"""Lets the tests of this folder train as the multi-process tests of "hop" do."""

import sys
from pathlib import Path

DISTRIBUTED = Path(__file__).resolve().parents[2] / "distributed"
for folder in (DISTRIBUTED, DISTRIBUTED / "hop"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
