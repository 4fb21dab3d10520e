"""Start training jobs, give each a deadline, and leave no process behind.

torchrun puts every worker into a session of its own, so killing torchrun's process group is not enough: a job that
ran out of time would leave its workers training in the background. Everything here therefore ends the whole tree.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def torchrun(workers: int, script: Path | str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command line that runs ``script`` on ``workers`` processes of this machine.

    Args:
        workers: processes to start.
        script: the training script.
        *arguments: what the script gets.
        options: further options of torchrun itself, such as ``--max-restarts=1``.
    """
    # The module instead of the command: it is the torchrun of *this* interpreter, on the PATH or not.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    return [*launcher, *options, str(script), *arguments]


def installed(module: str) -> bool:
    """Whether a script of this folder, run by this interpreter, would find ``module``.

    Not asked of this process: its path may hold the source folder of a package that was never built.
    """
    code = "import importlib.util as u, sys; sys.path[:] = filter(None, sys.path); "
    code += f"sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def require_averages(stats: Mapping[str, Any] | None) -> None:
    """Refuse the result of a run whose workers hardly ever averaged.

    Replicas that train on their own are fast, and on an easy task the average of them even scores well: neither time
    nor accuracy shows that nothing was exchanged. A group of one is no average, hence a quarter and not all steps.

    Args:
        stats: what ``sync.stats()`` said at the end; None for plain DDP, and without ``averages`` for dear: their
            workers cannot train on their own.

    Raises:
        RuntimeError: fewer averages than a quarter of the steps.
    """
    if stats is not None and "averages" in stats and stats["averages"] * 4 < stats["steps"]:
        raise RuntimeError(
            f"only {stats['averages']} averages in {stats['steps']} steps (consensus distance "
            f"{stats['consensus_distance']:.3g}): the workers trained on their own, so time and accuracy mean nothing"
        )


def descendants(pid: int) -> list[int]:
    """All living processes below ``pid``, parents before children (Linux; elsewhere an empty list)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command name stands in brackets and may hold spaces: what follows is "state ppid ...".
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def end(process: subprocess.Popen[Any], *, grace: float = 5.0) -> None:
    """End ``process`` and everything it started: politely first, by SIGKILL after ``grace`` seconds."""
    # Taken before the first signal: once torchrun is gone its workers belong to init and cannot be found any more.
    tree = descendants(process.pid)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    for pid in {process.pid, *tree}:
        # Only groups that a process of ours leads; a pid that is gone by now raises and is passed over.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run ``command`` while the block runs; whatever is left of it at the block's end is ended.

    Args:
        command: program and arguments.
        env: variables on top of the environment of this process.
        output: file for stdout and stderr together; without one they go where ours go.
    """
    process = subprocess.Popen(
        list(command),
        env={**os.environ, **(env or {})},
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)


def run(
    command: Sequence[str],
    *,
    deadline: float,
    env: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
) -> int:
    """Run ``command`` to its end and return its exit status.

    Raises:
        TimeoutError: it was still running after ``deadline`` seconds; it has been ended.
    """
    with started(command, env=env, output=output) as process:
        try:
            return process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {deadline:g} s: {' '.join(command)}") from None


def wait_all(processes: Sequence[subprocess.Popen[str]], *, deadline: float) -> list[int]:
    """Wait until all ``processes`` have ended; as soon as one fails, stop waiting for the others.

    Returns:
        The exit status of each; None became -1 for those that were still running when another one failed.

    Raises:
        TimeoutError: some were still running after ``deadline`` seconds.
    """
    limit = time.monotonic() + deadline
    while True:
        states = [process.poll() for process in processes]
        if all(state is not None for state in states) or any(state for state in states):
            return [-1 if state is None else state for state in states]
        if time.monotonic() > limit:
            running = [rank for rank, state in enumerate(states) if state is None]
            raise TimeoutError(f"processes {running} were still running after {deadline:g} s")
        time.sleep(0.05)
