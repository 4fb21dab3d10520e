"""The digits example: it learns and writes its log; killed or ended, it resumes to bit-equal weights.
And the demo: its runs end, and say when they reached the accuracy.

What needs no launcher runs in ranks of the test harness, as one starts the script without torchrun: these have imported
torch already, which is most of a short run.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Outcome, Rank, Ranks, free_port, launch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from processes import descendants, installed, require_averages, run, started, torchrun  # noqa: E402

# Not imported, which would take a second and more of each process of pytest.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")

SCRIPT = EXAMPLES / "train_digits.py"
WORKERS = 2
DEADLINE = 180.0  # seconds for one run; it takes about 10 on an idle machine, most of it importing torch

# What makes a run of the backend repeatable. Prague's generator answers in order of arrival, so that two runs with it
# average in different groups; its static schedule depends on (rank, step) alone.
REPEATABLE = {
    "gloo": [],
    "prague": ["--option=generator=static"],
    "dear": ["--option=allreduce_fallback=False"],
    "dssync": [],
    "hop": [],
}


def skip_without_torchext() -> None:
    # Asked of the interpreter that will run the script: this one may see the source folder, where nothing is built.
    # A torchext that is there and does not load is a failure, not a reason to skip: the script will say so.
    if not installed("torchext"):
        pytest.skip("torchext is not installed")


# What these add to the others is tested on every backend by tests/distributed/averaging, hop and ddp.
SLOW = pytest.mark.slow


@pytest.fixture(params=["prague", *(pytest.param(name, marks=SLOW) for name in ("gloo", "dear", "dssync", "hop"))])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "gloo":
        skip_without_torchext()
    return name


def train(folder: Path, backend: str, *arguments: str, deadline: float = DEADLINE) -> str:
    """Run the example to its end; returns what it printed, and fails with that if it did not succeed."""
    command = torchrun(WORKERS, SCRIPT, f"--backend={backend}", *arguments)
    output = folder / "output.txt"
    with output.open("w") as file:
        status = run(command, deadline=deadline, env={"OMP_NUM_THREADS": "1"}, output=file)
    text = output.read_text()
    assert status == 0, f"exit status {status}:\n{text}"
    return text


def body_script(rank: Rank, output: str, runs: list[tuple[int, list[str]]]) -> None:
    """Runs, one after the other: to import scikit-learn takes as long as one of them does."""
    for port, arguments in runs:
        os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.argv = [str(SCRIPT), *arguments]
        with Path(f"{output}.{rank.rank}").open("a") as file, contextlib.redirect_stdout(file):
            runpy.run_path(str(SCRIPT), run_name="__main__")


@contextlib.contextmanager
def running(folder: Path, backend: str, *runs: list[str]) -> Iterator[Ranks]:
    """The example in ranks of the harness, started without torchrun; rank 0 prints into ``folder/output.0``."""
    (folder / "output.0").unlink(missing_ok=True)
    given = [(free_port(), [f"--backend={backend}", *arguments]) for arguments in runs]
    with launch(body_script, WORKERS, str(folder / "output"), given) as ranks:
        yield ranks


def train_without_launcher(folder: Path, backend: str, *runs: list[str]) -> str:
    """Run the example to its end, with each of these arguments; returns what rank 0 printed."""
    with running(folder, backend, *runs) as ranks:
        ranks.values(DEADLINE)
        return (folder / "output.0").read_text()


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(checkpoint)["model"]
    return model


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), f"{name} differs by {(left[name] - right[name]).abs().max()}"


def test_learns_and_logs(backend: str, tmp_path: Path) -> None:
    log_file = tmp_path / "log.json"
    text = train_without_launcher(tmp_path, backend, ["--epochs=6", f"--log-file={log_file}"])
    log: dict[str, Any] = json.loads(log_file.read_text())
    require_averages(log["stats"])
    assert log["accuracy"] >= 0.95
    assert f"{log['accuracy']:.2%}" in text.splitlines()[-1]
    assert log["settings"]["backend"] == backend
    assert log["settings"]["world_size"] == WORKERS
    assert len(log["epochs"]) == 6
    samples = [step["samples"] for step in log["steps"]]
    assert samples == sorted(samples)
    # 1,437 images, one of them twice so that both workers have as many.
    assert samples[-1] == 6 * 1438
    assert all(step["ms"] > 0 for step in log["steps"])
    assert log["epochs"][-1]["loss"] < log["epochs"][0]["loss"]


def test_resume_equals_uninterrupted(backend: str, tmp_path: Path) -> None:
    options = REPEATABLE[backend]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    run, part = [*options, "--epochs=4", f"--checkpoint={whole}"], [*options, "--epochs=2", f"--checkpoint={parts}"]
    train_without_launcher(tmp_path, backend, run, part)
    # In new processes, whose generators of random numbers are not where the first part has left them.
    text = train_without_launcher(tmp_path, backend, [*options, "--epochs=4", f"--checkpoint={parts}", "--resume"])
    assert "after epoch 2" in text
    assert_equal(weights(whole), weights(parts))
    assert list(tmp_path.glob(".*.pt.*")) == [], "a temporary file was left behind"


def test_resumes_under_another_backend(tmp_path: Path) -> None:
    """What DDP's replicas begin with, parameters and momentum, must be the same: nothing would bring it together."""
    skip_without_torchext()
    checkpoint = tmp_path / "checkpoint.pt"
    train_without_launcher(tmp_path, "prague", ["--epochs=1", f"--checkpoint={checkpoint}"])
    first, second = torch.load(checkpoint)["workers"]
    assert any(not torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    train_without_launcher(tmp_path, "gloo", ["--epochs=2", f"--checkpoint={checkpoint}", "--resume"])
    first, second = torch.load(checkpoint)["workers"]
    assert_equal(first["model"], second["model"])
    momenta = [
        {str(number): state["momentum_buffer"] for number, state in worker["optimizer"]["state"].items()}
        for worker in (first, second)
    ]
    assert_equal(*momenta)


@pytest.mark.slow  # tests/distributed/warm restarts workers in seconds
def test_restarts_by_itself_after_a_worker_is_killed(tmp_path: Path) -> None:
    """With ``torchrun --max-restarts``. Prague only: plain Gloo's second attempt reads the addresses that the dead one
    left in the agent's store, and mostly fails to connect."""
    skip_without_torchext()
    options = [*REPEATABLE["prague"], "--epochs=6", "--step-ms=10"]
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    train(tmp_path, "prague", *options, f"--checkpoint={whole}")
    status, text = train_with_a_kill(tmp_path, "prague", killed, *options, restarts=1)
    assert status == 0, f"exit status {status}:\n{text}"
    assert "resumed from" in text
    assert_equal(weights(whole), weights(killed))


def test_resumes_after_a_killed_job(backend: str, tmp_path: Path) -> None:
    options = [*REPEATABLE[backend], "--epochs=4", "--step-ms=10"]
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    with running(tmp_path, backend, [*options, f"--checkpoint={killed}"]) as ranks:

        def first_checkpoint(_: list[list[str]], outcomes: dict[int, Outcome]) -> bool:
            return killed.exists() or bool(outcomes)

        while not ranks.wait_until(first_checkpoint, 0.02):
            pass
        ranks.kill(WORKERS - 1)
        (survivor,) = ranks.outcomes(deadline=DEADLINE)
    assert not survivor.ok, "a job that lost a worker ended well"
    assert 1 <= torch.load(killed)["epoch"] < 4
    resumed, uninterrupted = [*options, f"--checkpoint={killed}", "--resume"], [*options, f"--checkpoint={whole}"]
    text = train_without_launcher(tmp_path, backend, resumed, uninterrupted)
    assert "resumed from" in text
    assert_equal(weights(whole), weights(killed))


def train_with_a_kill(folder: Path, backend: str, checkpoint: Path, *options: str, restarts: int) -> tuple[int, str]:
    """Run the example and SIGKILL a worker after the first checkpoint; exit status and output."""
    arguments = [f"--backend={backend}", *options, f"--checkpoint={checkpoint}", "--resume"]
    command = torchrun(WORKERS, SCRIPT, *arguments, options=[f"--max-restarts={restarts}"])
    output = folder / "killed.txt"
    limit = time.monotonic() + DEADLINE
    with (
        output.open("w") as file,
        started(command, env={"OMP_NUM_THREADS": "1"}, output=file) as process,
    ):
        while not checkpoint.exists():
            assert process.poll() is None, f"ended before its first checkpoint:\n{output.read_text()}"
            assert time.monotonic() < limit, f"no checkpoint in {DEADLINE} s:\n{output.read_text()}"
            time.sleep(0.02)
        workers = [pid for pid in descendants(process.pid) if str(SCRIPT) in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(workers) == WORKERS
        os.kill(workers[-1], signal.SIGKILL)
        status = process.wait(max(1.0, limit - time.monotonic()))
    return status, output.read_text()


def test_demo_says_when_the_accuracy_was_reached(tmp_path: Path) -> None:
    skip_without_torchext()
    settings = ["--workers=3", "--samples=800", "--step-ms=20", "--target=0.2", f"--output={tmp_path / 'demo'}"]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        command = [sys.executable, str(EXAMPLES / "demo.py"), "--backends", "gloo", "hop", *settings]
        status = run(command, deadline=DEADLINE, output=file)
    text = output.read_text()
    assert status == 0, f"exit status {status}:\n{text}"
    assert "emulated" in text.splitlines()[0]
    assert [line.split()[0] for line in text.splitlines() if line.endswith("%")] == ["gloo", "hop"]
    assert (tmp_path / "demo" / "demo.png").is_file()
    figures = json.loads((tmp_path / "demo" / "hop.json").read_text())
    assert figures["steps"][0] > figures["steps"][2]  # the slow worker makes fewer
