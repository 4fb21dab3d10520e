"""The benchmark lab launches ranks, takes what they return, and leaves none behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lab_benchmarks import eventually, launch, needs_namespaces, netlab, reaper, training

pytestmark = pytest.mark.long

RANKS = """
import socket, time
import torch, torch.distributed as dist

def total(rank):
    seen = []
    for session in range(2):
        with rank.process_group("gloo"):
            value = torch.tensor([float(rank.rank + session)])
            dist.all_reduce(value)
            seen.append(value.item())
    return {"seen": seen, "host": socket.gethostname(), "setting": rank.settings["x"]}

def fail(rank):
    if rank.rank == 1:
        raise RuntimeError("rank one gave up")
    time.sleep(600)
"""

HANGING_RANKS = """
import os, subprocess, sys, time

def hang(rank):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.path.join(rank.settings["folder"], str(rank.rank)), "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "some_ranks.py").write_text(RANKS)
    (tmp_path / "hanging_ranks.py").write_text(HANGING_RANKS)
    return tmp_path


def test_launch_returns_what_the_ranks_return(scripts: Path) -> None:
    got = launch.launch("some_ranks:total", ranks=3, settings={"x": 5}, deadline_s=200, folder=scripts)
    assert [one["seen"] for one in got] == [[3.0, 6.0]] * 3
    assert {one["setting"] for one in got} == {5}


@needs_namespaces
def test_launch_inside_a_lab(scripts: Path) -> None:
    with netlab.NetLab(2, rate="100mbit") as lab:
        got = launch.launch("some_ranks:total", ranks=4, settings={"x": 5}, deadline_s=200, lab=lab, folder=scripts)
    assert [one["host"] for one in got] == ["host0", "host0", "host1", "host1"]
    assert [one["seen"] for one in got] == [[6.0, 10.0]] * 4


def test_a_failing_rank_ends_the_launch_with_its_output(scripts: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(launch.LaunchError, match="rank one gave up"):
        launch.launch("some_ranks:fail", ranks=2, deadline_s=300, folder=scripts)
    assert time.monotonic() - begin < 200


def test_the_deadline_kills_ranks_and_their_children(scripts: Path) -> None:
    with pytest.raises(launch.LaunchError, match=r"ranks \[0, 1\] still ran"):
        launch.launch("hanging_ranks:hang", ranks=2, settings={"folder": str(scripts)}, deadline_s=15, folder=scripts)
    pids = [int(pid) for rank in (0, 1) for pid in (scripts / str(rank)).read_text().split()]
    assert eventually(lambda: all(reaper.start_time(pid) is None for pid in pids))


def test_a_window_of_ddp_counts_and_checks() -> None:
    settings = {
        "contenders": ["ddp"],
        "options": {},
        "workload": {"layers": 2, "parameter_bytes": 8000, "forward_ms": 5.0, "backward_ms": 5.0},
        "stragglers": "one:3",
        "seed": 0,
        "repeats": 2,
        "warmup_s": 0.2,
        "window_s": 0.6,
    }
    got = launch.launch("lab.workloads.training:ranks", ranks=2, settings=settings, deadline_s=200)
    rates = training.gradients_per_second(got, 0.6)["ddp"]
    assert len(rates) == 2
    assert all(1 < rate <= 2 / 0.0299 for rate in rates)  # two workers, no step shorter than the straggler's 30 ms
    assert got[0]["checks"]["ddp"]["error"] < 1e-4
    assert training.summarize(got)["ddp"]["largest_error"] < 1e-4
