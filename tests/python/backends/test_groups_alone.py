"""A group of one rank: what needs no peer of what a backend's name promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore

import torchext
from torchext.backends import BACKENDS
from torchext.errors import BackendOptionsError, UnsupportedBackendError


def init(backend: str, **kwargs: Any) -> None:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **kwargs)


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_options_of_no_backend_are_refused() -> None:
    with pytest.raises(BackendOptionsError, match=r"pg_options for backend 'prague' is builtins\.dict"):
        init("prague", pg_options={"timeout": 3})


def test_typed_errors_and_registration() -> None:
    init("prague", timeout=timedelta(seconds=17))
    backend = torchext.backend_of()
    assert backend.name() == "prague" and backend.rank() == 0 and backend.size() == 1
    with pytest.raises(UnsupportedBackendError, match="'gloo'"):
        torchext.backend_of(dist.new_group(backend="gloo"))
    torchext.register()
    torchext.register()
    # Options are the user's: one object may serve several groups, and keeps what it was given.
    options = torchext.PragueOptions(timeout=timedelta(seconds=23))
    for _ in range(2):
        dist.new_group([0], backend="prague", timeout=timedelta(seconds=29), pg_options=options)
        assert options._timeout == timedelta(seconds=23) and not options.global_ranks_in_group
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=23), dist.group.WORLD)
    dist.all_reduce(torch.ones(7))


def test_a_device_that_is_not_carried() -> None:
    init("prague")
    with pytest.raises(NotImplementedError, match=r"meta(.|\n)*cpu and cuda"):
        torchext.backend_of().allreduce([torch.ones(2, device="meta")])


def entries(backend: str) -> list[dict[str, Any]]:
    """Of this process, in torch's flight recorder."""
    return list(json.loads(c10d._dump_fr_trace_json(backend=backend)).get("entries", []))


@pytest.mark.skipif(not hasattr(c10d, "FlightRecorderHook"), reason="this torch records its own backends only")
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_the_flight_recorder_names_the_backend_and_the_call(backend: str) -> None:
    init(backend)
    before = len(entries(backend))
    dist.all_reduce(torch.ones(10))
    dist.broadcast(torch.ones(2, 3), 0)
    one = dist.new_group([0], backend=backend)
    dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3), group=one)
    dist.barrier()
    recorded = entries(backend)[before:]
    names = [entry["profiling_name"] for entry in recorded]
    assert names[:2] == [f"{backend}:all_reduce", f"{backend}:broadcast"], names
    assert names[-1] == f"{backend}:barrier" and any("reduce_scatter" in name for name in names), names
    world = [entry for entry in recorded if entry["process_group"][1] == "default_pg"]
    assert [entry["input_sizes"] for entry in world[:2]] == [[[10]], [[2, 3]]], world
    assert [entry["profiling_name"] for entry in world] == [names[0], names[1], names[-1]], world
    numbers = [entry["collective_seq_id"] for entry in world]
    assert numbers == sorted(numbers), numbers
