"""``attach(..., on_peer_failure="continue")`` and ``join_running_job`` where they need no second process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.errors import BackendOptionsError


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pair(group: dist.ProcessGroup | None = None) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def begin(backend: str, store: HashStore) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return pair()


def test_what_cannot_go_on_is_refused() -> None:
    ddp, optimizer = begin("dear", HashStore())
    with pytest.raises(ValueError, match=r"dear's workers hold a slice .* torchrun --max-restarts"):
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    with pytest.raises(ValueError, match=r"'raise' or 'continue', got 'ignore'"):
        torchext.attach(ddp, optimizer, on_peer_failure="ignore")  # type: ignore[arg-type]


def test_two_models_on_one_group() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.new_group(backend="dssync")
    first, second = pair(group), pair(group)
    kept = torchext.attach(*first, on_peer_failure="continue")
    for choice in ("continue", "raise"):
        with pytest.raises(ValueError, match="another attached model has the same process group"):
            torchext.attach(*second, on_peer_failure=choice)  # type: ignore[arg-type]
    kept.detach()


def steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_training_needs_no_store() -> None:
    """The store dies: nobody can join any more, and the group trains on."""
    ddp, optimizer = begin("prague", HashStore())
    sync: Any = torchext.attach(ddp, optimizer, on_peer_failure="continue")
    calls = []

    def gone() -> list[int]:
        calls.append(True)
        raise dist.DistNetworkError("connection was reset")

    sync._recovery.membership._admission.newcomers = gone
    for _ in range(2):
        steps(ddp, optimizer, 3)
        sync.synchronize()
    assert len(calls) >= 2
    assert sync.stats()["workers"] == 1
    sync.detach()


def test_what_is_no_request_is_refused_and_training_goes_on() -> None:
    root = HashStore()
    ddp, optimizer = begin("prague", root)
    sync = torchext.attach(ddp, optimizer, on_peer_failure="continue")
    store = PrefixStore("torchext/newcomers", root)
    strange = ["hello", "[1]", "{}", '{"backend": "prague"}', '{"version": "9.9", "compression": "none"}']
    for text in strange:
        store.set(f"{store.add('count', 1)}/request", text)
    for _ in range(2):
        steps(ddp, optimizer, 2)
        with sync.averaged():
            pass
    refusals = [store.get(f"{number}/heard/1").decode() for number in range(1, len(strange) + 1)]
    assert all(refusal.startswith("its ") for refusal in refusals), refusals
    assert sync.stats()["workers"] == 1
    sync.detach()


def test_arguments_of_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta, got 5 \(int\); timedelta\(seconds="):
        torchext.join_running_job("hop", store=HashStore(), timeout=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout must be more than 0 and at most 3650 days, got 0:00:00"):
        torchext.join_running_job("hop", store=HashStore(), timeout=timedelta(0))
    for method in ("tcp://x:abc", "tcp://x:99999", "tcp://x:0", "tcp://x", "tcp://:29500", "bogus", "file://"):
        with pytest.raises(ValueError, match=rf"with a port in 1\.\.65535, got '{method}'"):
            torchext.join_running_job("hop", method)
    with pytest.raises(TypeError, match=r"init_method must be a str, got .*HashStore"):
        torchext.join_running_job("hop", HashStore())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'env://' needs MASTER_ADDR and MASTER_PORT in the environment"):
        torchext.join_running_job("hop")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for port in ("zzz", "", "-1", "65536"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ValueError, match=rf"MASTER_PORT in the environment must be in 1\.\.65535, got '{port}'"):
            torchext.join_running_job("hop")
    with pytest.raises(TypeError, match=r"takes a process group of torch\.distributed, .* got 3 \(int\)"):
        torchext.backend_of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"backend must be one of 'dssync', 'hop', 'prague', got 'dear'"):
        torchext.join_running_job("dear")
    with pytest.raises(ValueError, match=r"init_method must be env://, tcp://host:port or file:///path, .*got 'tcp:4'"):
        torchext.join_running_job("hop", "tcp:4")
    with pytest.raises(BackendOptionsError, match=r"pass torchext\.HopOptions"):
        torchext.join_running_job("hop", pg_options=torchext.PragueOptions())
    assert not dist.is_initialized()


def test_a_newcomer_that_nobody_lets_in() -> None:
    torchext.join_running_job("prague", store=HashStore(), timeout=timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match=r"torchext\.join_running_job after init_process_group"):
        torchext.join_running_job("prague", store=HashStore())
    ddp, optimizer = pair()
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"no worker let this one in within 0\.5 s\. They do when all meet"):
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    assert time.monotonic() - start < 5
    with pytest.raises(dist.DistStoreError, match=r"no worker let this one in within 0\.5 s"):  # asks anew
        torchext.attach(ddp, optimizer, on_peer_failure="continue")


def test_a_newcomer_is_attached_as_those_that_it_joins() -> None:
    torchext.join_running_job("prague", store=HashStore())
    ddp, optimizer = pair()
    with pytest.raises(ValueError, match=r"attached as those it joins are, with on_peer_failure='continue'"):
        torchext.attach(ddp, optimizer)
    assert dist.get_world_size() == 1
