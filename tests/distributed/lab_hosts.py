"""Runs a script on every host of a network lab."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torchext

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lab.net import netlab  # noqa: E402

__all__ = ["netlab", "run_on"]

DEADLINE = 90.0
PORT = 29400  # free for certain: a fresh namespace has all ports to itself


def run_on(lab: netlab.NetLab, script: Path) -> list[list[Any]]:
    """What each host's rank printed, line by line."""
    processes = []
    try:
        for rank in range(lab.hosts):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(lab.hosts),
                "MASTER_PORT": str(PORT),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(torchext.__file__).parents[1]),
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                **lab.environment(rank),
            }
            command = [sys.executable, str(script)]
            processes.append(
                lab.popen(rank, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        results = []
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, err
            results.append([json.loads(line) for line in out.splitlines()])
        return results
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
