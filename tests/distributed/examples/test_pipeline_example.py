"""examples/train_pipeline.py plans, trains to a lower loss over four processes, and draws its plan."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from processes import run, torchrun  # noqa: E402


def test_it_plans_and_learns(tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    draws = importlib.util.find_spec("matplotlib") is not None
    arguments = ["--steps=40", "--blocks=4", *([f"--png={picture}"] if draws else [])]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        status = run(
            torchrun(4, EXAMPLES / "train_pipeline.py", *arguments),
            deadline=120,
            env={"OMP_NUM_THREADS": "1"},
            output=file,
        )
    text = output.read_text()
    assert status == 0, text
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", text)]
    assert losses[-1] < 0.8 * losses[0], text
    assert "4 ranks: 2 stages, each on 2 ranks, 8 micro-batches through each pipeline" in text
    assert re.search(r"predicted [\d.]+ ms a step, measured [\d.]+", text)
    assert picture.exists() == draws
