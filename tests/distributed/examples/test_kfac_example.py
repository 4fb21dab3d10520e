"""examples/train_kfac.py reaches its loss, alone and in the environment that torchrun makes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from interpreters import environments, run_interpreters

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

# Not imported, which would take a second and more of each process of pytest.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the example's data are in scikit-learn")


@pytest.mark.parametrize(("workers", "optimizer"), [pytest.param(1, "spd", marks=pytest.mark.slow), (2, "pad")])
def test_reaches_the_loss(tmp_path: Path, workers: int, optimizer: str) -> None:
    command = [EXAMPLES / "train_kfac.py", f"--optimizer={optimizer}", "--target=0.1", "--plan"]
    ended = run_interpreters(tmp_path, command, environments(workers) if workers > 1 else [{}])
    assert all(each.code == 0 for each in ended), ended
    text = ended[0].out
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", text)]
    assert losses[-1] < 0.1 < losses[0]
    assert f"strategy {optimizer}, {workers} rank(s)" in text
