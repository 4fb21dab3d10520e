"""torchrun's agent, played by a test: a process that starts thin processes of torchext_warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torchext_warm

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 60.0

AGENT = """
import json, subprocess, sys
children = {}
for line in sys.stdin:
    order = json.loads(line)
    if "start" in order:
        child = subprocess.Popen(order["start"], env=order["env"], cwd=order["cwd"], start_new_session=True,
                                 stdout=open(order["out"], "w"), stderr=subprocess.STDOUT, stdin=open(order["in"]))
        children[child.pid] = child
        print(child.pid, flush=True)
    else:
        print(children[order["wait"]].wait(), flush=True)
"""


class Agent:
    """A process in torchrun's place; the scripts run in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.started = 0

    def _order(self, **order: Any) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *words: str, options: tuple[str, ...] = (), stdin: Path = Path("/dev/null"), **env: str) -> int:
        """The pid of a thin process that is to run ``words``."""
        self.started += 1
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return self._order(
            start=[sys.executable, "-u", "-m", "torchext_warm", *options, *words],
            env={**os.environ, "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env},
            cwd=str(self.folder),
            out=str(self.folder / f"out{self.started}"),
            **{"in": str(stdin)},
        )

    def wait(self, pid: int) -> int:
        """How it ended, as subprocess says it."""
        return self._order(wait=pid)

    def said(self, number: int = 1) -> str:
        """All that the process started as this one has printed so far."""
        return (self.folder / f"out{number}").read_text()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    address = "@" + torchext_warm._address(agent.process.pid)[1:].decode()
    yield agent
    agent.process.kill()
    agent.process.wait()
    until(lambda: address not in Path("/proc/net/unix").read_text(), "the server outlives its agent")


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return name


def until(true: Callable[[], Any], what: str) -> Any:
    limit = time.monotonic() + DEADLINE
    while not (value := true()):
        assert time.monotonic() < limit, what
        time.sleep(0.02)
    return value


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


WAITS = """
import os, signal, subprocess, sys, time
def told(number, frame):
    print("told", number, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, told)
child = subprocess.Popen(["sleep", "1000"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(1000)
"""


def pids(agent: Agent, number: int = 1) -> list[int]:
    return [int(word) for word in until(lambda: agent.said(number), "no worker").split()[1:3]]
