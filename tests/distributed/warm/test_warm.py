"""torchext_warm: a forked worker is what torchrun would have started, and ends with what it belongs to.

Most tests play torchrun's agent themselves (warm_agent.py), with scripts that write down what they see.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rows import row
from warm_agent import DEADLINE, ROOT, WAITS, Agent, agent, gone, pids, until, write

__all__ = ["agent"]  # a fixture


def test_the_script_sees_what_it_would_see(agent: Agent, tmp_path: Path) -> None:
    """The same script, started by torchext_warm and by Python itself."""
    script = write(
        tmp_path,
        """
        import sys
        imported = "torch" in sys.modules
        import json, os, signal, pickle, helper
        class Own: pass
        def link(number: int):
            try:
                return os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                return ""
        print(json.dumps({
            "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "name": __name__, "file": __file__,
            "environment": {k: v for k, v in os.environ.items() if not k.startswith("_")}, "spec": __spec__ is None,
            "affinity": sorted(os.sched_getaffinity(0)), "stdin": sys.stdin.read(),
            "leads": os.getsid(0) == os.getpid(),
            "annotation": repr(link.__annotations__),
            "main": sys.modules["__main__"].__dict__ is globals(), "own": pickle.loads(pickle.dumps(Own)) is Own,
            "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "helper": helper.VALUE,
            "files": [n for n in range(256) if n < 3 or "socket" in link(n) or "pidfd" in link(n)],
        }))
        print(imported, os.getppid(), len(os.listdir("/proc/self/task")), file=sys.stderr)
        """,
    )
    write(tmp_path, "VALUE = 7\n", "helper.py")
    (tmp_path / "in").write_text("typed")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    plain = subprocess.run(
        [sys.executable, script, "--lr", "a b"],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "RANK": "1"},
        cwd=tmp_path,
        stdin=(tmp_path / "in").open(),
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    first = agent.start(script, "--lr", "a b", stdin=tmp_path / "in", RANK="0")
    second = agent.start(script, "--lr", "a b", stdin=tmp_path / "in", RANK="1")
    assert (agent.wait(first), agent.wait(second)) == (0, 0), agent.said(1) + agent.said(2)
    seen, (imported, server, threads) = (part(agent.said(2)) for part in (body, trailer))
    expected = body(plain.stdout)
    assert expected["files"] == [0, 1, 2]  # so nothing of the server's is left there
    assert seen == expected
    assert trailer(plain.stderr)[0] == "False"
    assert (imported, threads) == ("True", "1")
    assert trailer(agent.said(1))[1] == server


def body(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    return result


def trailer(text: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(("True", "False"))).split()


ENDS = [
    ("pass", 0, ""),
    ("sys.exit(7)", 7, ""),
    ("sys.exit('no data')", 1, "no data"),
    ("raise KeyError('lr')", 1, "KeyError: 'lr'"),
    ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
    ("atexit.register(print, 'at exit')", 0, "at exit"),
]


def run(agent: Agent, *words: str, **env: str) -> tuple[int, str]:
    """How it ends, and all that it prints."""
    status = agent.wait(agent.start(*words, options=("--preload=numpy,colorsys",), **env))
    return status, agent.said(agent.started)


def check_ends(agent: Agent, folder: Path) -> None:
    for ends, status, says in ENDS:
        script = write(folder, f"import atexit, os, signal, sys\nprint('begun')\n{ends}\n")
        ended, said = run(agent, script)
        assert ended == status, (ends, said)
        assert said.startswith("begun\n") and says in said, ends


def check_modules(agent: Agent, folder: Path) -> None:
    """Run by -m, and what --preload has the server import."""
    (folder / "package").mkdir()
    write(
        folder,
        """
        import sys
        imported = "colorsys" in sys.modules
        from multiprocessing import get_context
        from .values import double
        if __name__ == "__main__":
            with get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]), imported, sys.argv[1:], __package__)
        """,
        "package/train.py",
    )
    write(folder, "def double(x):\n    return 2 * x\n", "package/values.py")
    assert run(agent, "-m", "package.train", "--lr", "1") == (0, "[2, 4] True ['--lr', '1'] package\n")


def check_processes(agent: Agent, folder: Path) -> None:
    """Forked and spawned ones, which must find the script's functions."""
    script = write(
        folder,
        """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            for way in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(way).Pool(2) as pool:
                    print(way, pool.map(double, [1, 2]))
        """,
    )
    status, said = run(agent, script)
    assert status == 0, said
    assert said.splitlines() == [f"{way} [2, 4]" for way in ("fork", "spawn", "forkserver")]


def check_large_environment(agent: Agent, folder: Path) -> None:
    """It comes to the server in many pieces."""
    script = write(folder, "import os\nprint(sum(len(v) for k, v in os.environ.items() if k.startswith('LARGE')))\n")
    large = {f"LARGE{number}": "x" * 100_000 for number in range(10)}
    assert run(agent, script, **large) == (0, "1000000\n")


def check_random_numbers(agent: Agent, folder: Path) -> None:
    """As in processes of their own: numpy's and Python's differ, torch's do not."""
    script = write(folder, "import numpy, random, torch\nprint(numpy.random.rand(), random.random(), torch.rand(1))\n")
    (status, said), (other_status, other_said) = run(agent, script), run(agent, script)
    assert (status, other_status) == (0, 0), said + other_said
    (numpy, python, torch), (other_numpy, other_python, other_torch) = said.split(), other_said.split()
    assert numpy != other_numpy and python != other_python and torch == other_torch


def test_scripts_of_one_server(agent: Agent, tmp_path: Path) -> None:
    for check in (check_ends, check_modules, check_processes, check_large_environment, check_random_numbers):
        with row(check.__name__):
            check(agent, tmp_path)


def test_signals_reach_the_worker(agent: Agent, tmp_path: Path) -> None:
    """Killed, it takes its worker with it, and no other."""
    script = write(tmp_path, WAITS)
    thin, other = agent.start(script), agent.start(script)
    killed, left = pids(agent, 1), pids(agent, 2)
    os.kill(thin, signal.SIGKILL)
    assert agent.wait(thin) == -signal.SIGKILL
    until(lambda: all(map(gone, killed)), "the worker or its child outlives its thin process")
    assert not any(map(gone, left))
    os.kill(other, signal.SIGTERM)
    assert agent.wait(other) == 5
    assert f"told {int(signal.SIGTERM)}" in agent.said(2)
    os.kill(left[1], signal.SIGKILL)


def test_all_end_with_the_agent(agent: Agent, tmp_path: Path) -> None:
    thin = agent.start(write(tmp_path, WAITS))
    own = pids(agent)
    agent.process.kill()
    until(lambda: all(map(gone, [thin, *own])), "a process outlives the agent")


def test_all_end_with_the_server(agent: Agent, tmp_path: Path) -> None:
    thin = agent.start(write(tmp_path, WAITS + "#"))
    worker, child = pids(agent)
    status = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(status[1]), signal.SIGKILL)
    assert agent.wait(thin) == 1
    assert "the server ended, and its workers with it" in agent.said()
    until(lambda: gone(worker), "the worker outlives the server")
    os.kill(child, signal.SIGKILL)
    # The next to come makes a new one.
    thin = agent.start(write(tmp_path, "print('again')\n", "again.py"))
    assert agent.wait(thin) == 0
    assert agent.said(2) == "again\n"


def test_what_cannot_be_imported(agent: Agent, tmp_path: Path) -> None:
    script = write(tmp_path, "print('begun')\n")
    pid = agent.start(script, options=("--preload=no_such_module",))
    assert agent.wait(pid) == 1
    assert "No module named 'no_such_module'" in agent.said() and "begun" not in agent.said()


def test_without_torchrun_the_script_runs_as_it_is(tmp_path: Path) -> None:
    script = write(tmp_path, "import os, sys\nprint('torch' in sys.modules, os.getppid(), sys.argv)\n")
    done = subprocess.run(
        [sys.executable, "-m", "torchext_warm", script, "1"],
        env={k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RUN_ID"} | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout == f"False {os.getpid()} ['{script}', '1']\n"


def test_torchrun_restarts_into_the_same_server(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        imported = "torch" in sys.modules
        import torch, torch.distributed as dist
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
        dist.init_process_group("prague")
        total = torch.ones(1)
        dist.all_reduce(total)
        line = f"attempt {attempt} {rank} {imported} {os.getppid()} {total.item():.0f}\\n"
        os.write(1, line.encode())  # in one piece: both write into one pipe
        dist.barrier()
        if attempt == "0" and rank == 1:
            os.kill(os.getpid(), 9)
        dist.all_reduce(total)
        dist.destroy_process_group()
        """,
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "--monitor-interval=0.1", "-m", "torchext_warm", script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("attempt"))
    server = lines[0][3]
    expected = [[attempt, rank, "True", server, "2"] for attempt in "01" for rank in "01"]
    assert lines == expected, done.stdout + done.stderr
    until(lambda: gone(int(server)), "the server outlives torchrun")
