"""Runs one function as n ranks, each a process of its own, and never leaves one behind.

    def body(rank: Rank, factor):             # at module level: it is sent by name
        rank.init("prague")
        rank.report("ready")                  # the test can act at this point
        ...
        return value                          # anything picklable

    with launch(body, 4, 2.0) as ranks:
        ranks.expect("ready")                 # of every rank
        ranks.kill(3, signal.SIGKILL)
        outcomes = ranks.outcomes(deadline=10)  # of those that live; an Outcome each

A rank that is done stays alive until the test has every outcome it asked for: a survivor that exits closes its
connections, which would tell the others what the code under test must tell them.

Processes come from a fork server that has imported torch once, and what else tests use (rank_imports.py), so that
starting eight of them takes a tenth of a second. Each leads a process group of its own; leaving the `with` block kills
the groups, and a rank whose test has been killed ends by itself.

A test that fails says how long the machine held it up: where that comes near a limit of the test's, it may be why. One
whose deadline has passed says where its ranks are, and with what errors others have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["rank_imports"])

# Generous: shared runners stall. Tests of speed assert times of their own.
DEADLINE = 60.0

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_SHOW_STACKS = signal.SIGRTMAX


@dataclass
class Outcome:
    """How a rank ended: with a value, or with an error."""

    rank: int
    value: Any = None
    error: str = ""  # the exception's type
    message: str = ""  # and its text
    trace: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


class Rank:
    """What a body gets to know, and its line to the test."""

    def __init__(self, rank: int, size: int, folder: Path, line: Connection) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self._line = line

    def init(
        self,
        backend: str = "prague",
        *,
        store: str = "store",
        timeout: float = 30.0,
        world_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            backend,
            init_method=f"file://{self.folder / store}",
            rank=self.rank,
            world_size=world_size or self.size,
            timeout=timedelta(seconds=timeout),
            **kwargs,
        )

    def within(self, folder: Path, *, alone: bool = False) -> Rank:
        """The same, with a folder of its own; alone: the only rank of another group."""
        return Rank(0, 1, folder, self._line) if alone else Rank(self.rank, self.size, folder, self._line)

    def report(self, word: str) -> None:
        self._line.send(("report", word))

    def pause(self) -> None:
        """Waits for the test's `proceed`."""
        self._line.recv()


def fork(target: Callable[..., Any], *args: Any) -> multiprocessing.context.ForkServerProcess:
    """Starts a process of the fork server, and that first if it is not running."""
    path = os.environ.get("PYTHONPATH")
    # The server's path has the working folder, and what this says.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), *([path] if path else [])])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    process = forkserver.Process(target=target, args=args, daemon=False)
    process.start()
    return process


def _stacks(folder: str, rank: int) -> Path:
    """Where a rank writes the Python stacks of its threads when it gets the signal `_SHOW_STACKS`."""
    return Path(folder) / f"stacks-{rank}"


def _die_with_the_test() -> None:
    """Even if stopped: the kernel ends a rank with the fork server, and that ends with the test's process.

    It does so once nobody holds the write end of its pipe any more; each of its children has a copy of that, to start
    children of its own by it, which ranks don't do.
    """
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank_main(body: Callable[..., Any], rank: int, size: int, folder: str, line: Connection, args: Any) -> None:
    _die_with_the_test()
    os.setpgid(0, 0)
    import torch

    torch.set_num_threads(1)
    context = Rank(rank, size, Path(folder), line)
    stacks = _stacks(folder, rank).open("w")
    faulthandler.register(_SHOW_STACKS, file=stacks)
    try:
        result = ("value", body(context, *args))
    except BaseException as error:  # the test judges it
        result = ("error", type(error).__name__, str(error), traceback.format_exc())
    line.send(result)
    with contextlib.suppress(EOFError, OSError):
        while line.recv() != "leave":
            pass
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Ranks:
    """The running ranks, seen from the test."""

    def __init__(self, body: Callable[..., Any], size: int, folder: str, args: Any) -> None:
        self.size = size
        self._folder = folder
        self._lines: list[Connection] = []
        self.processes = []
        self._seen: list[list[str]] = [[] for _ in range(size)]
        self._outcomes: dict[int, Outcome] = {}
        self._killed: set[int] = set()
        for rank in range(size):
            ours, theirs = forkserver.Pipe()
            self.processes.append(fork(_rank_main, body, rank, size, folder, theirs, args))
            theirs.close()
            self._lines.append(ours)

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        if signum == signal.SIGKILL:
            self._killed.add(rank)
        os.kill(self.pid(rank), signum)

    def expect_stopped(self, rank: int, deadline: float = DEADLINE) -> None:
        """Waits until the rank's process is stopped (SIGSTOP)."""
        end = time.monotonic() + deadline
        while Path(f"/proc/{self.pid(rank)}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, f"rank {rank} has not been stopped within {deadline:g} s"
            time.sleep(0.02)

    def exit_code(self, rank: int) -> int | None:
        """Of a rank whose process is ending; negative: of the signal that ended it."""
        self.processes[rank].join(DEADLINE)
        return self.processes[rank].exitcode

    def proceed(self, ranks: list[int] | None = None) -> None:
        for rank in ranks if ranks is not None else self.alive():
            self._lines[rank].send("go")

    def alive(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self._killed]

    def expect(self, word: str, ranks: list[int] | None = None, deadline: float = DEADLINE) -> None:
        """Waits until the ranks have reported `word`."""
        wanted = set(ranks if ranks is not None else self.alive())
        self._demand(
            lambda: all(word in self._seen[r] or r in self._outcomes for r in wanted), deadline, f"report {word!r}"
        )
        for rank in wanted:
            assert word in self._seen[rank], f"rank {rank} ended before {word!r}: {self._outcomes[rank]}"

    def said(self) -> list[str]:
        """What the ranks have reported so far."""
        return [word for words in self._seen for word in words]

    def wait_until(self, done: Callable[[list[list[str]], dict[int, Outcome]], bool], deadline: float) -> bool:
        """Waits until `done(words reported by each rank, outcomes so far)`; False when the deadline passes first."""
        return self._pump(lambda: done(self._seen, self._outcomes), deadline)

    def outcomes(self, ranks: list[int] | None = None, deadline: float = DEADLINE) -> list[Outcome]:
        """Waits for the ranks' outcomes; by default of all that were not killed."""
        wanted = ranks if ranks is not None else self.alive()
        self._demand(lambda: all(r in self._outcomes for r in wanted), deadline, "outcome")
        return [self._outcomes[rank] for rank in wanted]

    def values(self, deadline: float = DEADLINE) -> list[Any]:
        """The values of all ranks; fails if one raised."""
        outcomes = self.outcomes(deadline=deadline)
        for outcome in outcomes:
            assert outcome.ok, f"rank {outcome.rank}: {outcome.trace}"
        return [outcome.value for outcome in outcomes]

    def _demand(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        if not self._pump(done, deadline):
            missing = [r for r in self.alive() if r not in self._outcomes]
            where = self._whereabouts(missing)
            raise AssertionError(f"no {what} within {deadline:g} s; still running: {missing}\n{where}")

    def _pump(self, done: Callable[[], bool], deadline: float) -> bool:
        """Takes what the ranks say until `done`; False when the deadline passes first."""
        end = time.monotonic() + deadline
        lines = {line: rank for rank, line in enumerate(self._lines)}
        while not done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            for line in wait(list(lines), timeout=left):
                rank = lines[line]  # type: ignore[index]
                try:
                    message = line.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    del lines[line]  # type: ignore[arg-type]
                    if rank not in self._outcomes:
                        self._outcomes[rank] = Outcome(rank, error="ProcessEnded", message="without a word")
                    continue
                if message[0] == "report":
                    self._seen[rank].append(message[1])
                elif message[0] == "value":
                    self._outcomes[rank] = Outcome(rank, value=message[1])
                else:
                    self._outcomes[rank] = Outcome(rank, error=message[1], message=message[2], trace=message[3])
        return True

    def _whereabouts(self, running: list[int]) -> str:
        """The stacks of ranks that are still running, and the errors with which others have ended."""
        texts = [f"rank {rank} ended: {o.trace or o.message}" for rank, o in sorted(self._outcomes.items()) if o.error]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), _SHOW_STACKS)
        time.sleep(0.5)  # a rank that is stopped, or not yet in its body, writes nothing
        for rank in running:
            with contextlib.suppress(OSError):
                texts.append(f"rank {rank} is here:\n{_stacks(self._folder, rank).read_text()}")
        return "\n".join(texts)

    def close(self) -> None:
        for rank, line in enumerate(self._lines):
            with contextlib.suppress(OSError):
                line.send("leave")
            if rank in self._killed or rank not in self._outcomes:
                self._end(rank)
        end = time.monotonic() + 10
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, end - time.monotonic()))
            self._end(rank)
            process.join(5)
        for line in self._lines:
            line.close()

    def _end(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid(rank), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(rank), signal.SIGKILL)


class _HoldUps:
    """How long this process was held up while it ran: what a busy machine, or its host, does to a test's limits."""

    _PERIOD = 0.02

    def __init__(self) -> None:
        self._done = threading.Event()
        self._longest = 0.0
        self._stolen = self._stolen_seconds()
        self._start = time.monotonic()
        self._watch = threading.Thread(target=self._run, daemon=True, name="hold-ups")
        self._watch.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._done.wait(self._PERIOD):
            now = time.monotonic()
            self._longest = max(self._longest, now - before - self._PERIOD)
            before = now

    @staticmethod
    def _stolen_seconds() -> float:
        """By the host, of all cores together: proc(5), the eighth figure of /proc/stat."""
        ticks = int(Path("/proc/stat").read_text().split(None, 9)[8])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._done.set()
        self._watch.join()

    def __str__(self) -> str:
        took = time.monotonic() - self._start
        return (
            f"in {took:.1f} s the test's own process was held up for {self._longest:.2f} s at most, "
            f"and the host took {self._stolen_seconds() - self._stolen:.2f} s of its cores"
        )


@contextlib.contextmanager
def launch(body: Callable[..., Any], size: int, *args: Any) -> Iterator[Ranks]:
    """Starts `size` ranks of `body`; see the module's first lines."""
    with tempfile.TemporaryDirectory(prefix="torchext-test-") as folder, contextlib.closing(_HoldUps()) as hold_ups:
        ranks = Ranks(body, size, folder, args)
        try:
            yield ranks
        except BaseException as error:
            error.add_note(str(hold_ups))
            raise
        finally:
            ranks.close()


def run_ranks(body: Callable[..., Any], size: int, *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """The values of all ranks of `body`; fails if one raises or the deadline passes."""
    with launch(body, size, *args) as ranks:
        return ranks.values(deadline)


class _Ports:
    """TCP ports of this process' own, among those that the kernel gives to nobody who does not ask for them.

    A port that was free a moment ago among all others is taken once in a while before its rank listens there: by a
    connection, by a rank of another test, or by the very rank that tries to reach it and reaches itself.
    """

    _BLOCK = 64

    def __init__(self) -> None:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        everywhere = [range(start, start + self._BLOCK) for start in range(10240, 65536 - self._BLOCK, self._BLOCK)]
        blocks = [block for block in everywhere if block.start > last or block.stop <= first] or everywhere
        random.shuffle(blocks)
        # Holds the block against other processes like this one, for as long as this one lives.
        self._claim = socket.socket(socket.AF_UNIX)
        for block in blocks:
            try:
                self._claim.bind(f"\0torchext-test-ports-{block.start}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                self._ports = itertools.cycle(block)
                return
        raise RuntimeError(f"other processes of tests have claimed all {len(blocks)} blocks of ports")

    def next(self) -> int:
        for port in itertools.islice(self._ports, self._BLOCK):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
        raise RuntimeError(f"{self._BLOCK} ports of tests are all in use")


_ports = functools.cache(_Ports)


def free_port() -> int:
    """A port on which nobody listens, nor will by chance."""
    return _ports().next()


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def elapsed_error(call: Any) -> tuple[str, str, float]:
    """(type, text, seconds) of the error that `call` must raise."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:  # its type is what the tests compare
        return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("no error was raised")
