"""examples/train_kfac.py reaches its loss, alone and under torchrun."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from processes import run, torchrun  # noqa: E402

# Not imported, which would take a second and more of each process of pytest.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the example's data are in scikit-learn")


@pytest.mark.parametrize(("workers", "optimizer"), [pytest.param(1, "spd", marks=pytest.mark.slow), (2, "pad")])
def test_reaches_the_loss(tmp_path: Path, workers: int, optimizer: str) -> None:
    script = EXAMPLES / "train_kfac.py"
    arguments = [f"--optimizer={optimizer}", "--target=0.1", "--plan"]
    command = [sys.executable, str(script), *arguments] if workers == 1 else torchrun(workers, script, *arguments)
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        status = run(command, deadline=60, env={"OMP_NUM_THREADS": "1"}, output=file)
    text = output.read_text()
    assert status == 0, text
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", text)]
    assert losses[-1] < 0.1 < losses[0]
    assert f"strategy {optimizer}, {workers} rank(s)" in text
