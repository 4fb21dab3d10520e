"""Command lines that examples refuse before they train: each says what to type."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

# Not imported, which would take a second and more of each process of pytest.
needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")


def begins_to_train(*_: Any, **__: Any) -> None:
    raise AssertionError("it was not refused")


def refusal(
    script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What it says on standard error."""
    path = str(EXAMPLES / script)
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(dist, "init_process_group", begins_to_train)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code == 2
    return capsys.readouterr().err


@needs_sklearn
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epochs=0"], "--epochs must be at least 1, got 0"),
        (["--batch-size=-2"], "--batch-size must be at least 1, got -2"),
        (["--lr=nan"], "--lr must be above 0 and finite, got nan"),
        (["--lr-decay=-3"], "--lr-decay must be above 0 and finite, got -3"),
        (["--step-ms=-5"], "--step-ms must be at least 0, got -5"),
        (["--min-accuracy=97"], "--min-accuracy is a share from 0 to 1, got 97"),
        (["--straggler=0.5"], "--straggler K needs K >= 1"),
        (["--straggler=3"], "--straggler K needs K >= 1 and --step-ms above 0, got 3 and 0"),
        (["--resume"], "--resume needs --checkpoint FILE"),
        (["--option=group_size=2"], "--option belongs to torchext's backends, not to gloo"),
        (["--backend=mpi"], "invalid choice"),
        ([], "torchrun --nproc-per-node 4"),
    ],
)
def test_train_digits(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal("train_digits.py", arguments, monkeypatch, capsys)


@needs_sklearn
@pytest.mark.parametrize("option", ["--checkpoint", "--log-file"])
@pytest.mark.parametrize(("name", "reason"), [("", "Is a directory"), ("file/digits.pt", "cannot write")])
def test_train_digits_writes_there_before_it_trains(
    option: str,
    name: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, value)
    path = tmp_path / name
    said = refusal("train_digits.py", [f"{option}={path}"], monkeypatch, capsys)
    assert reason in said and str(path) in said, said


def test_train_ctr_writes_there_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "ctr.pt"
    said = refusal("train_ctr.py", ["--data", str(tmp_path), "--checkpoint", str(path)], monkeypatch, capsys)
    assert f"cannot write --checkpoint {path}: No such file or directory" in said
