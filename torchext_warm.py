"""Workers of torchrun that start without importing torch: one process of a host has imported it for all of them.

    torchrun --nproc-per-node=8 --max-restarts=3 -m torchext_warm train.py --lr 0.1
    torchrun ... -m torchext_warm --preload=numpy,transformers -m package.train --lr 0.1

What torchrun starts is then a thin process for each rank. The first of them makes a server, which imports torch, the
parts of it that DistributedDataParallel needs, torchext and what ``--preload`` names, and forks a worker for each rank
that asks. When torchrun restarts the job the server is still there, and the new workers run after a tenth of a second.
On the first start the imports are made once for the host, not once for each rank, and their memory is shared.

The script sees what it would see without this: arguments, environment, working directory, standard streams, affinity to
processors, ``__main__``. Signals to the thin process reach the worker, its end is the worker's end, by exit code or
signal; when it is killed, the worker is, with all of its process group. The server ends with torchrun, and the workers
with the server. Its one own trait: what is imported before the script runs is not imported by it, so variables that are
read at imports (PYTHONPATH, TORCH_LOGS) have the values of the job's first start.

Without torchrun the script is run as it is. Linux only. Nothing here imports torch but the server.

Processes::

    torchrun's agent
      +- thin process of a rank     its pid is what torchrun prints and signals
    server                          a session of its own; holds no tensor, no thread, and has not touched a GPU
      +- worker of a rank           a session of its own

They talk through an abstract Unix socket. Its name is a digest of the agent's memory layout, which the kernel shows to
no other user: nobody else can take the name first. Both sides check that the other is of this user.

The server waits for nobody but all: a request that is not complete within seconds, or is longer than any, is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import types
from pathlib import Path
from typing import Any, NoReturn

# DistributedDataParallel imports the compiler, which takes longer than the rest of torch.
PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torchext")
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGCONT,
)
_LENGTH = struct.Struct("=Q")
_STATUS = struct.Struct("=i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_REQUEST_LIMIT_S = 10.0
_LONGEST_REQUEST = 64 << 20  # bytes; Linux passes a process some megabytes of arguments and environment at most


def main() -> None:
    """Of ``python -m torchext_warm``."""
    preload, arguments = _parse(sys.argv[1:])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        _run(arguments)
        return
    agent = os.getppid()
    connection = _connect(agent)
    if connection is None:
        listener = _listen(agent)
        if listener is not None and os.fork() == 0:
            request = _Server(listener, agent, preload).serve()
            # From here on this is a worker.
            _become(request)
            _run(request["arguments"])
            return
        if listener is not None:
            listener.close()
        connection = _connect(agent)
        if connection is None:
            sys.exit("torchext_warm: the server that imports torch could not be started")
    _follow(connection, arguments)


def _parse(words: list[str]) -> tuple[list[str], list[str]]:
    """What is to be imported besides PRELOAD, and the script (or -m and a module) with its arguments."""
    preload: list[str] = []
    while words and words[0].startswith("--preload"):
        option, _, names = words.pop(0).partition("=")
        if option != "--preload" or not names:
            sys.exit(f"torchext_warm: {option!r}: write --preload=MODULE,MODULE")
        preload += names.split(",")
    if not words or (words[0].startswith("-") and words[0] != "-m") or words == ["-m"]:
        sys.exit("usage: torchrun ... -m torchext_warm [--preload=MODULE,...] (SCRIPT | -m MODULE) [ARGUMENT ...]")
    return preload, words


# ---- The thin process ----


def _address(agent: int) -> bytes:
    """Of the server for an agent: with the time when that was started, for a pid may come again."""
    started = Path(f"/proc/{agent}/stat").read_bytes().rpartition(b")")[2].split()[19]
    # Where the kernel has put program, loader and stack at random; it stays the same as long as the agent lives.
    secret = Path(f"/proc/{agent}/auxv").read_bytes()
    return b"\0torchext-warm-%b" % hashlib.blake2b(b"%d %b " % (agent, started) + secret).hexdigest()[:64].encode()


def _check_user(connection: socket.socket) -> None:
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        connection.close()
        raise PermissionError(f"torchext_warm: the other end belongs to user {user}, not {os.getuid()}")


def _connect(agent: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_address(agent))
    except ConnectionRefusedError:
        connection.close()
        return None
    _check_user(connection)
    return connection


def _listen(agent: int) -> socket.socket | None:
    """Of the thin processes of an agent one gets it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(agent))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    listener.listen(socket.SOMAXCONN)
    return listener


def _follow(connection: socket.socket, arguments: list[str]) -> NoReturn:
    """Asks for a worker, hands signals on, and ends as it ends."""
    request = json.dumps(
        {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "processors": sorted(os.sched_getaffinity(0)),
        }
    ).encode()
    # From the request on there may be a worker to be told, and not in the middle of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    for number in FORWARDED:
        signal.signal(number, lambda which, _: connection.sendall(bytes([which])))
    try:
        socket.send_fds(connection, [_LENGTH.pack(len(request))], [0, 1, 2])
        connection.sendall(request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        status = connection.recv(_STATUS.size, socket.MSG_WAITALL)
    except OSError:
        status = b""
    if len(status) < _STATUS.size:
        sys.exit("torchext_warm: the server ended, and its workers with it")
    (code,) = _STATUS.unpack(status)
    if os.WIFSIGNALED(code):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
        if os.WTERMSIG(code) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(code), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(code))
    os._exit(os.WEXITSTATUS(code))


# ---- The server ----


class _Request:
    """What a thin process asks for, as far as it has arrived."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + _REQUEST_LIMIT_S
        self.streams: list[int] = []
        self._length: int | None = None
        self._bytes = bytearray()

    def read(self, connection: socket.socket) -> dict[str, Any] | None:
        """All of it, once it is there. ValueError: it is none; OSError: nothing more comes."""
        if self._length is None:
            head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
            self.streams += streams
            if len(head) != _LENGTH.size or len(self.streams) != 3:
                raise ValueError("a request begins with its length and three descriptors")
            (self._length,) = _LENGTH.unpack(head)
            if self._length > _LONGEST_REQUEST:
                raise ValueError(f"a request of {self._length} bytes, where {_LONGEST_REQUEST} is the most")
            return None
        part = connection.recv(min(self._length - len(self._bytes), 1 << 20))
        if not part:
            raise ConnectionResetError("the request is cut off")
        self._bytes += part
        return self._parsed() if len(self._bytes) == self._length else None

    def _parsed(self) -> dict[str, Any]:
        request = json.loads(self._bytes)
        if not isinstance(request, dict) or request.keys() != {"arguments", "environment", "folder", "processors"}:
            raise ValueError("a request has arguments, environment, folder and processors")
        return request

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream)


class _Server:
    """Imports, and then forks a worker for each connection, until the agent ends."""

    def __init__(self, listener: socket.socket, agent: int, preload: list[str]) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(2, 1)
        os.close(nowhere)
        self._agent = os.pidfd_open(agent)
        self._import(preload)
        # A signal that ends a child writes into the second.
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        self._workers: dict[int, socket.socket] = {}
        self._asking: dict[socket.socket, _Request] = {}
        for what in (self._listener, self._agent, self._woken):
            self._selector.register(what, selectors.EVENT_READ)

    @staticmethod
    def _import(preload: list[str]) -> None:
        import gc
        import importlib

        # torch.cuda.is_available() would otherwise initialize the driver, after which a fork cannot use it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        for name in (*PRELOAD, *preload):
            importlib.import_module(name)
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_initialized():
            sys.exit(f"torchext_warm: importing {', '.join(preload)} initializes CUDA, which forked workers cannot use")
        gc.collect()
        gc.freeze()  # a collection in a worker would copy the pages of all that was imported

    def serve(self) -> dict[str, Any]:
        """Returns in the workers only, with what its thin process asked for."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fd == self._agent:
                    self._end()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                    self._reap()
                elif key.fileobj in self._asking:
                    request = self._ask(key.fileobj)
                    if request is not None:
                        return request
                else:
                    self._hear(key.fileobj, key.data)
            for connection in [c for c, asked in self._asking.items() if asked.deadline < time.monotonic()]:
                self._drop(connection)

    def _patience(self) -> float | None:
        """Seconds until the first incomplete request is dropped."""
        deadlines = [asked.deadline for asked in self._asking.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            _check_user(connection)
        except OSError:  # of another user, and closed
            return
        connection.setblocking(False)
        self._asking[connection] = _Request()
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, connection: Any) -> None:
        self._asking.pop(connection).close()
        self._selector.unregister(connection)
        connection.close()

    def _ask(self, connection: Any) -> dict[str, Any] | None:
        """Forks a worker once the request is complete; its request, in the worker."""
        try:
            request = self._asking[connection].read(connection)
        except BlockingIOError:
            return None
        except (OSError, ValueError, RecursionError):  # killed before it had asked, or no thin process of ours
            self._drop(connection)
            return None
        if request is None:
            return None
        asked = self._asking.pop(connection)
        server = os.getpid()
        worker = os.fork()
        if worker == 0:
            self._leave()
            connection.close()
            return request | {"streams": asked.streams, "server": server}
        asked.close()
        connection.setblocking(True)
        self._workers[worker] = connection
        self._selector.modify(connection, selectors.EVENT_READ, worker)
        return None

    def _leave(self) -> None:
        """In a forked worker: nothing of the server's stays open."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        os.close(self._agent)
        for end in (self._listener, self._woken, self._wake, *self._workers.values(), *self._asking):
            end.close()
        for asked in self._asking.values():
            asked.close()

    def _hear(self, connection: Any, worker: int) -> None:
        """Signals to be handed on; the end of the connection is that of the thin process."""
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        if worker not in self._workers:  # reaped in this round
            return
        for number in numbers:
            os.kill(worker, number)
        if not numbers:
            self._selector.unregister(connection)
            self._kill(worker)

    def _kill(self, worker: int) -> None:
        # Its group, where it has made one by now, then itself.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(worker, signal.SIGKILL)

    def _reap(self) -> None:
        while self._workers:
            worker, status = os.waitpid(-1, os.WNOHANG)
            if worker == 0:
                return
            connection = self._workers.pop(worker, None)
            if connection is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(_STATUS.pack(status))
                connection.close()

    def _end(self) -> NoReturn:
        """The agent is gone: so must be the workers."""
        for worker in self._workers:
            self._kill(worker)
        os._exit(0)


# ---- A worker ----


def _become(request: dict[str, Any]) -> None:
    """Makes a fork of the server what torchrun would have started."""
    import atexit
    import ctypes
    import gc

    atexit.register(gc.unfreeze)  # what is imported ends as in any process
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the server
    if os.getppid() != request["server"]:
        os._exit(1)
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    for file in (sys.stdout, sys.stderr):
        file.reconfigure(line_buffering=file.isatty() or file is sys.stderr)  # type: ignore[union-attr]
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    with contextlib.suppress(OSError):  # a processor has gone since
        os.sched_setaffinity(0, request["processors"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:  # Python's own generator does so by itself, torch's begins alike in every process
        numpy.random.seed()


def _run(arguments: list[str]) -> None:
    """As ``python SCRIPT ...`` or ``python -m MODULE ...``."""
    import runpy

    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0]).absolute()
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=__builtins__)
    sys.modules["__main__"] = module
    # dont_inherit: the script's annotations are not to be strings because ours are.
    exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    main()
