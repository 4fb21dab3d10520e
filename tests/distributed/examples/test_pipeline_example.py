"""examples/train_pipeline.py plans, trains to a lower loss over four processes, and draws its plan."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from interpreters import environments, run_interpreters

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_it_plans_and_learns(tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    draws = importlib.util.find_spec("matplotlib") is not None
    arguments = ["--steps=20", "--blocks=2", *([f"--png={picture}"] if draws else [])]
    ended = run_interpreters(tmp_path, [EXAMPLES / "train_pipeline.py", *arguments], environments(4))
    assert all(each.code == 0 for each in ended), ended
    text = "\n".join(each.out for each in ended)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", text)]
    assert losses[-1] < 0.8 * losses[0], text
    assert "4 ranks: 2 stages, each on 2 ranks, 8 micro-batches through each pipeline" in text
    assert re.search(r"predicted [\d.]+ ms a step, measured [\d.]+", text)
    assert picture.exists() == draws
