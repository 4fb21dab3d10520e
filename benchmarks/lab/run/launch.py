"""Starts the ranks of a benchmark as processes, waits for their results, and leaves none behind.

A rank function is a module-level function, ``def ranks(rank: Rank) -> Any``, of a script of these benchmarks;
what it returns comes back through JSON. A failing rank ends the launch at once with the end of its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.net.netlab import NetLab
from lab.run.board import Board

_FOLDER = Path(__file__).resolve().parent.parent.parent
_SCRIPTS = sorted(path for path in _FOLDER.iterdir() if path.is_dir() and path.name not in ("cpp", "lab", "results"))
_GRACE_S = 3.0
_LOG_TAIL = 3000


class LaunchError(RuntimeError):
    """A rank failed or the deadline passed; the message holds the end of the rank's output."""


def free_port() -> int:
    """Returns a TCP port that nobody held a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(
    function: str,
    *,
    ranks: int,
    settings: Mapping[str, Any] | None = None,
    deadline_s: float = 600.0,
    lab: NetLab | None = None,
    folder: Path = _FOLDER,
) -> list[Any]:
    """Runs ``function`` on ``ranks`` processes.

    Args:
        function: ``"module:name"``; the module is imported from ``folder``.
        ranks: Number of processes; in a lab they are dealt to its hosts in equal blocks.
        settings: Given to every rank as ``rank.settings``; must be JSON.
        deadline_s: After it every rank is killed and LaunchError raised.
        lab: An open lab; None is loopback.
        folder: Where the module is.

    Returns:
        What each rank returned, in order of rank.
    """
    module, _, name = function.partition(":")
    with tempfile.TemporaryDirectory(prefix="lab-") as scratch:
        job = Path(scratch)
        description = {"module": module, "function": name, "settings": dict(settings or {})}
        (job / "job.json").write_text(json.dumps(description))
        Board.create(job / "board", ranks)
        with _processes(job, ranks, lab, folder) as processes:
            _wait(processes, job, time.monotonic() + deadline_s)
        return [json.loads((job / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@contextlib.contextmanager
def _processes(job: Path, ranks: int, lab: NetLab | None, folder: Path) -> Iterator[list[subprocess.Popen[Any]]]:
    hosts = lab.hosts if lab is not None else 1
    a_host = -(-ranks // hosts)
    # A lab's hosts have just been made, so every port there is free; it cannot be asked for from outside.
    port = free_port() if lab is None or not lab.emulated else 29500
    command = [sys.executable, "-m", "lab.run.rank", str(job)]
    paths = [str(folder), *map(str, _SCRIPTS), str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    started: list[subprocess.Popen[Any]] = []
    try:
        for rank in range(ranks):
            host = rank // a_host
            where = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} if lab is None else lab.environment(host)
            environment = {
                **os.environ,
                **where,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank % a_host),
                "LOCAL_WORLD_SIZE": str(min(a_host, ranks - host * a_host)),
                "GROUP_RANK": str(host),
                "LAB_PARENT": str(os.getpid()),
            }
            with (job / f"rank{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command if lab is None else lab.command(host, command),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # a process group of its own: what a rank starts is killed with it
                    )
                )
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            process.wait()


def _wait(processes: list[subprocess.Popen[Any]], job: Path, deadline: float) -> None:
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            # Often the first to exit is not the first to fail: give the culprit time to write its reason.
            time.sleep(_GRACE_S)
            codes = [process.poll() for process in processes]
            raise LaunchError(f"lab: exit codes {codes} (None: still running)\n{_tails(job, failed)}")
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise LaunchError(f"lab: the deadline passed, ranks {running} still ran\n{_tails(job, running)}")
        time.sleep(0.05)


def _tails(job: Path, ranks: list[int]) -> str:
    logs = [(rank, (job / f"rank{rank}.log").read_text(errors="replace")[-_LOG_TAIL:]) for rank in ranks[:3]]
    return "\n".join(f"--- rank {rank}, the end of its output ---\n{text}" for rank, text in logs)
