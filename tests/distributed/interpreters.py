"""Scripts, each rank an interpreter of its own: for tests of what happens when a script ends.

An interpreter here is a process of the harness' fork server, which has torch imported already; that is most of a short
script's time. It runs the script as `__main__` and then goes through the whole end of an interpreter, as `python
script.py` does: the handler of uncaught exceptions, exit handlers, finalization, static destructors. The fork server's
own way to end a child, `os._exit`, is none of these.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import sys
import textwrap
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness import DEADLINE, fork, free_port


@dataclass
class Ended:
    """How a script's interpreter ended."""

    code: int  # exit status; -N if signal N ended it
    out: str
    err: str
    seconds: float  # until it and all before it had ended


def run_script(folder: Path, source: str, size: int, *args: str) -> list[Ended]:
    """Runs `size` ranks of a script in torchrun's environment, and waits for all."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    return run_interpreters(folder, [script, *args], environments(size))


def environments(size: int) -> list[dict[str, str]]:
    """What torchrun gives to the ranks of a job on this host."""
    job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def run_interpreters(folder: Path, argv: list[str | Path], environments: list[dict[str, str]]) -> list[Ended]:
    """Runs `argv` once for each of the environments, all at the same time: a script, or -m and a module, and words."""
    words = [str(word) for word in argv]
    start = time.monotonic()
    processes = []
    for number, env in enumerate(environments):
        output = str(folder / f"interpreter-{number}")
        processes.append(fork(_interpreter, words, env, output))
    ended = []
    try:
        for number, process in enumerate(processes):
            process.join(max(0.0, start + DEADLINE - time.monotonic()))
            assert process.exitcode is not None, "\n".join(
                [
                    f"interpreter {number} is still running after {DEADLINE:g} s",
                    *(f"{other}: exit status {each.exitcode}" for other, each in enumerate(processes)),
                    *(f"{other}: {_written(folder, other, 'err')}" for other in range(len(processes))),
                ]
            )
            out, err = (_written(folder, number, stream) for stream in ("out", "err"))
            ended.append(Ended(process.exitcode, out, err, time.monotonic() - start))
    finally:
        for process in processes:
            process.kill()
            process.join(5)
    return ended


def _written(folder: Path, number: int, stream: str) -> str:
    file = folder / f"interpreter-{number}.{stream}"
    return file.read_text() if file.exists() else ""


def _interpreter(argv: list[str], env: dict[str, str], output: str) -> NoReturn:
    os.setpgid(0, 0)
    os.environ.update(env)
    for descriptor, stream in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    import torch

    torch.set_num_threads(1)
    # What was imported before the fork lives to the end: searching it for garbage would take most of the end's time.
    gc.freeze()
    code = 0
    try:
        _run(argv)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # what the interpreter does with one
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code))  # flushes, finalizes and ends the process
    raise AssertionError("unreachable")


def _run(argv: list[str]) -> None:
    """As `__main__`."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=argv[0], __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), main.__dict__)
