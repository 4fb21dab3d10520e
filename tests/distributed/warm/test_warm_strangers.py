"""torchext_warm: who may talk to the server of an agent, and what others cannot do to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from warm_agent import DEADLINE, WAITS, Agent, agent, gone, pids, write

import torchext_warm

__all__ = ["agent"]  # a fixture


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_other_users_are_refused(agent: Agent, tmp_path: Path) -> None:
    thin = agent.start(write(tmp_path, WAITS))
    worker, child = pids(agent)
    address = next(line for line in Path("/proc/net/unix").read_text().split() if line.startswith("@torchext-warm-"))
    script = """
        import os, socket, sys
        os.setuid(65534)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        connection.connect("\\0" + sys.argv[1])
        try:
            print(connection.recv(1))
        except ConnectionResetError:
            print(b"")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), address[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.stdout == "b''\n", done.stderr  # closed, without a word
    assert not gone(worker)
    os.kill(thin, signal.SIGTERM)
    assert agent.wait(thin) == 5
    os.kill(child, signal.SIGKILL)


def test_the_server_waits_for_no_single_process(agent: Agent, tmp_path: Path) -> None:
    """Silent connections, half a request, impossible lengths and any bytes: workers start, and those that run go on."""
    first = agent.start(write(tmp_path, WAITS))
    worker, child = pids(agent)
    connections = []
    for text in (b"", b"x", struct.pack("=Q", 2**62), struct.pack("=Q", 2**64 - 1), struct.pack("=Q", 100), b"[" * 20):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(torchext_warm._address(agent.process.pid))
        if text:
            socket.send_fds(connection, [text[:8]], [0, 0, 0])
            with contextlib.suppress(BrokenPipeError):  # told already that it is too long
                connection.sendall(text[8:])
        connections.append(connection)
    for text in (b"hello", b"[1]", b"{}", b'{"arguments": []}'):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(torchext_warm._address(agent.process.pid))
        socket.send_fds(connection, [struct.pack("=Q", len(text))], [0, 0, 0])
        connection.sendall(text)
        connections.append(connection)
    start = time.monotonic()
    second = agent.start(write(tmp_path, "print('runs')", "second.py"))
    assert agent.wait(second) == 0 and "runs" in agent.said(2)
    assert time.monotonic() - start < torchext_warm._REQUEST_LIMIT_S  # of the silent ones
    assert not gone(worker)
    # Those that asked for what cannot be are told by the end of the connection, the silent ones after a while.
    for connection in connections:
        connection.settimeout(DEADLINE)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()
    os.kill(first, signal.SIGTERM)
    assert agent.wait(first) == 5
    os.kill(child, signal.SIGKILL)
