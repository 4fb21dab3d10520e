"""The cable between two hosts (network namespaces): pulled for two seconds, pulled for good, and slow."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from case_choice import quick_on
from harness import DEADLINE
from test_two_hosts import Host, hosts, ip  # noqa: F401

import torchext

pytestmark = pytest.mark.sanitize

SCRIPT = """
    import sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist, torchext

    rank, store, backend, heartbeat, timeout, operation, seconds, numel = sys.argv[1:]
    options = torchext.backends.BACKENDS[backend].options(
        heartbeat_timeout=timedelta(seconds=float(heartbeat)),
        operation_timeout=timedelta(seconds=float(operation)),
        timeout=timedelta(seconds=float(timeout)),
    )
    dist.init_process_group(
        backend, init_method="file://" + store, rank=int(rank), world_size=2, pg_options=options
    )
    tensor = torch.ones(int(numel))
    more = torch.ones(1)
    dist.all_reduce(more)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    try:
        while more.item():
            more.fill_(time.monotonic() - begin < float(seconds))
            dist.all_reduce(more, op=dist.ReduceOp.MIN)
            dist.all_reduce(tensor.fill_(1.0))
            assert tensor[-1].item() == 2.0
        print(f"went on for {time.monotonic() - begin:.1f} s", torchext.backend_of().failure, flush=True)
    except dist.DistBackendError as error:
        print(f"failed after {time.monotonic() - begin:.1f} s:", error, flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def two_ranks(pair: list[Host], folder: Path, backend: str, *arguments: float) -> Iterator[list[subprocess.Popen[str]]]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    path = os.pathsep.join([str(Path(torchext.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    processes = []
    try:
        for rank, host in enumerate(pair):
            command = ["ip", "netns", "exec", host.namespace, sys.executable, str(script), str(rank)]
            command += [str(folder / "store"), backend, *map(str, arguments)]
            env = os.environ | {"GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            processes.append(subprocess.Popen(command, env=env, **pipes))
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        go(processes)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=DEADLINE)


def go(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def results(processes: list[subprocess.Popen[str]]) -> list[str]:
    """One line of each, while both live."""
    lines = []
    for process in processes:
        assert process.stdout is not None
        lines.append(process.stdout.readline().strip())
    return lines


def cable(pair: list[Host], state: str) -> None:
    ip("-n", pair[0].namespace, "link", "set", pair[0].device, state)


@pytest.mark.parametrize("backend", quick_on("hop"))
def test_a_flap_of_two_seconds_is_no_alarm(hosts: list[Host], tmp_path: Path, backend: str) -> None:  # noqa: F811
    with two_ranks(hosts, tmp_path, backend, 5, 60, 0, 5, 1000) as processes:
        time.sleep(0.5)
        cable(hosts, "down")
        time.sleep(2)
        cable(hosts, "up")
        for line in results(processes):
            assert re.match(r"went on for [0-9.]+ s \(-1, ''\)", line), line


@pytest.mark.parametrize("backend", quick_on("dssync"))
def test_a_cable_that_is_pulled(hosts: list[Host], tmp_path: Path, backend: str) -> None:  # noqa: F811
    with two_ranks(hosts, tmp_path, backend, 1.5, 60, 0, 30, 1000) as processes:
        time.sleep(0.5)
        cable(hosts, "down")
        start = time.monotonic()
        for rank, line in enumerate(results(processes)):
            assert f"rank {1 - rank} has been silent for" in line, line
        assert time.monotonic() - start < 6


def slow(pair: list[Host]) -> None:
    for host in pair:
        shape = f"tc qdisc add dev {host.device} root tbf rate 20mbit burst 20kb latency 50ms"
        subprocess.run(["ip", "netns", "exec", host.namespace, *shape.split()], check=True)


@pytest.mark.parametrize("backend", quick_on("dear"))
def test_a_slow_cable_is_no_fault(hosts: list[Host], tmp_path: Path, backend: str) -> None:  # noqa: F811
    """An all_reduce that takes longer than the timeout while its bytes flow: 12 MB over 20 Mb/s, and 2 s."""
    slow(hosts)
    with two_ranks(hosts, tmp_path, backend, 2, 2, 0, 0, 3_000_000) as processes:
        for line in results(processes):
            took = re.match(r"went on for ([0-9.]+) s \(-1, ''\)", line)
            assert took and float(took.group(1)) > 2, line


@pytest.mark.parametrize("backend", quick_on("prague"))
def test_the_limit_of_a_whole_operation(hosts: list[Host], tmp_path: Path, backend: str) -> None:  # noqa: F811
    """``operation_timeout`` ends what would take 20 s of flowing bytes, on both ranks."""
    slow(hosts)
    with two_ranks(hosts, tmp_path, backend, 10, 60, 1.5, 0, 12_000_000) as processes:
        start = time.monotonic()
        for line in results(processes):
            reason = re.search(r"rank [01] timed out in all_reduce #[0-9]+, .* its operation_timeout of 1500ms", line)
            assert reason, line
        assert time.monotonic() - start < 10
