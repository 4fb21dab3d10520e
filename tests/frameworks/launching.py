"""Runs a training script as two processes, as torchrun would start them, and never leaves one behind.

Scripts stand in ``scripts/``; each does several cases on several backends, since importing a framework takes longer
than they do. For the same reason processes are forked from one that has imported torch (``torchext_warm``), unless a
test asks how Python itself starts a script. What a script reports (``RESULT`` and JSON, a line for each rank) is what
the tests compare.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import free_port

SCRIPTS = Path(__file__).resolve().parent / "scripts"
DEADLINE = 240.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_DISABLED": "true"}


@dataclass
class Ended:
    """How the processes of one script ended, by rank."""

    statuses: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def results(self) -> list[dict[str, Any]]:
        """What each rank reported, by the names of the cases; fails if one did not end in order."""
        assert self.statuses == [0] * len(self.statuses), "\n".join([*self.outputs, *self.errors])
        return [self._of(output) for output in self.outputs]

    def by_backend(self) -> dict[str, list[dict[str, Any]]]:
        """The same of scripts that go through several backends: what each rank reported of each of them."""
        everyone = self.results()
        return {backend: [reported[backend] for reported in everyone] for backend in everyone[0]}

    @staticmethod
    def _of(output: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for line in output.splitlines():
            if line.startswith("RESULT "):
                for name, value in json.loads(line.removeprefix("RESULT ")).items():
                    found[name] = {**found[name], **value} if name in found else value
        return found


def skip_without(*modules: str) -> None:
    """Skips a file where a framework is not installed; importing one takes seconds in each process of pytest."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)


@functools.cache
def warm() -> list[str]:
    """What stands in front of a command that a forked process runs."""
    frameworks = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is not None]
    imported = ["transformers.trainer" if name == "transformers" else name for name in frameworks]
    return ["-m", "torchext_warm", *([f"--preload={','.join(imported)}"] if imported else [])]


def under_run(backend: str) -> list[str]:
    """``-m torchext.run`` for a backend, or for one of the forms that the tests know."""
    name, _, form = backend.partition(" ")
    # Without the first steps by plain all-reduce, in which nothing is in slices.
    options = [f"form={form}", "allreduce_fallback=false"] if form else []
    if name in ("prague", "dssync"):  # else two workers would be the same after each step
        options.append("sync_period=5")
    return ["-m", "torchext.run", "--backend", name, *(word for option in options for word in ("--option", option))]


def run_workers(
    command: list[str], folder: Path, ranks: int = 2, *, is_forked: bool = True, **environment: str
) -> Ended:
    """Runs ``python COMMAND`` once for each rank, in a folder of the test's.

    Args:
        command: A script or ``-m`` and a module, with arguments.
        folder: Where it runs.
        ranks: How many processes.
        is_forked: From a process that has imported torch, torchext and some frameworks; False: a new interpreter.
        environment: Variables for all ranks.
    """
    command = [*warm(), *command] if is_forked else command
    ports = [str(free_port()) for _ in range(8)]
    processes = []
    with contextlib.ExitStack() as files:
        streams = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * ranks)]
        try:
            for rank in range(ranks):
                variables = {
                    **os.environ,
                    **OFFLINE,
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "GROUP_RANK": "0",
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": ports[0],
                    "FREE_PORTS": ",".join(ports),
                    # What frameworks look for to know that processes have been started for them.
                    "TORCHELASTIC_RUN_ID": "none",
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")]),
                }
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=folder,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=streams[2 * rank],
                        stderr=streams[2 * rank + 1],
                        start_new_session=True,
                    )
                )
            _await(processes)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for stream in streams:
            stream.seek(0)
        texts = [stream.read() for stream in streams]
    return Ended([process.returncode for process in processes], texts[::2], texts[1::2])


def _await(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or the deadline."""
    end = time.monotonic() + DEADLINE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
