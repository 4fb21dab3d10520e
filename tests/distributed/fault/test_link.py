"""The cable between two hosts (network namespaces): pulled for two seconds, pulled for good, and slow."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from case_choice import quick_on
from harness import Rank, Ranks, launch
from namespaces import enter
from test_two_hosts import Host, hosts, ip  # noqa: F401

import torchext

pytestmark = pytest.mark.sanitize


def body_reduces(
    rank: Rank, pair: list[Host], backend: str, seconds: float, numel: int, limits: dict[str, float]
) -> str:
    """Reduces tensors for some seconds, and says how that went; the group ends when the test lets it."""
    host = pair[rank.rank]
    enter(host.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = host.device
    durations = {name: timedelta(seconds=limit) for name, limit in limits.items()}
    rank.init(backend, timeout=limits["timeout"], pg_options=torchext.backends.BACKENDS[backend].options(**durations))
    tensor, more = torch.ones(numel), torch.ones(1)
    dist.all_reduce(more)
    rank.report("ready")
    rank.pause()
    begin = time.monotonic()
    try:
        while more.item():
            more.fill_(time.monotonic() - begin < seconds)
            dist.all_reduce(more, op=dist.ReduceOp.MIN)
            dist.all_reduce(tensor.fill_(1.0))
            assert tensor[-1].item() == 2.0
        return f"went on for {time.monotonic() - begin:.1f} s {torchext.backend_of().failure}"
    except dist.DistBackendError as error:
        return f"failed after {time.monotonic() - begin:.1f} s: {error}"


@contextlib.contextmanager
def two_ranks(
    pair: list[Host], backend: str, *, seconds: float = 0, numel: int = 1000, **limits: float
) -> Iterator[Ranks]:
    """Ranks that have begun; limits: the options of their group, in seconds."""
    with launch(body_reduces, 2, pair, backend, seconds, numel, limits) as ranks:
        ranks.expect("ready")
        ranks.proceed()
        yield ranks


def cable(pair: list[Host], state: str) -> None:
    ip("-n", pair[0].namespace, "link", "set", pair[0].device, state)


@pytest.mark.parametrize("backend", quick_on("hop"))
def test_a_flap_of_two_seconds_is_no_alarm(hosts: list[Host], backend: str) -> None:  # noqa: F811
    with two_ranks(hosts, backend, seconds=5, heartbeat_timeout=5, timeout=60) as ranks:
        time.sleep(0.5)
        cable(hosts, "down")
        time.sleep(2)
        cable(hosts, "up")
        for line in ranks.values():
            assert re.match(r"went on for [0-9.]+ s \(-1, ''\)", line), line


@pytest.mark.parametrize("backend", quick_on("dssync"))
def test_a_cable_that_is_pulled(hosts: list[Host], backend: str) -> None:  # noqa: F811
    with two_ranks(hosts, backend, seconds=30, heartbeat_timeout=1.5, timeout=60) as ranks:
        time.sleep(0.5)
        cable(hosts, "down")
        start = time.monotonic()
        for rank, line in enumerate(ranks.values()):
            assert f"rank {1 - rank} has been silent for" in line, line
        assert time.monotonic() - start < 6


def slow(pair: list[Host]) -> None:
    for host in pair:
        shape = f"tc qdisc add dev {host.device} root tbf rate 20mbit burst 20kb latency 50ms"
        subprocess.run(["ip", "netns", "exec", host.namespace, *shape.split()], check=True)


@pytest.mark.parametrize("backend", quick_on("dear"))
def test_a_slow_cable_is_no_fault(hosts: list[Host], backend: str) -> None:  # noqa: F811
    """An all_reduce that takes longer than the timeout while its bytes flow: 12 MB over 20 Mb/s, and 2 s."""
    slow(hosts)
    with two_ranks(hosts, backend, numel=3_000_000, heartbeat_timeout=2, timeout=2) as ranks:
        for line in ranks.values():
            took = re.match(r"went on for ([0-9.]+) s \(-1, ''\)", line)
            assert took and float(took.group(1)) > 2, line


@pytest.mark.parametrize("backend", quick_on("prague"))
def test_the_limit_of_a_whole_operation(hosts: list[Host], backend: str) -> None:  # noqa: F811
    """``operation_timeout`` ends what would take 20 s of flowing bytes, on both ranks."""
    slow(hosts)
    with two_ranks(hosts, backend, numel=12_000_000, heartbeat_timeout=10, timeout=60, operation_timeout=1.5) as ranks:
        start = time.monotonic()
        for line in ranks.values():
            reason = re.search(r"rank [01] timed out in all_reduce #[0-9]+, .* its operation_timeout of 1500ms", line)
            assert reason, line
        assert time.monotonic() - start < 10
