"""torch's flight recorder shows the collectives of our groups, by the backend's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from torch._C import _distributed_c10d as c10d

from torchext.backends import BACKENDS

pytestmark = pytest.mark.skipif(
    not hasattr(c10d, "FlightRecorderHook"),
    reason="this torch records only the backends that record themselves, its own",
)


def body(rank: Rank, backend: str) -> Any:
    rank.init(backend)
    dist.all_reduce(torch.ones(10))
    dist.broadcast(torch.ones(2, 3), 0)
    half = dist.new_group([0, 1], backend=backend)
    dist.reduce_scatter_tensor(torch.ones(3), torch.ones(6), group=half)
    dist.barrier()
    entries = json.loads(c10d._dump_fr_trace_json(backend=backend))["entries"]
    return [(e["profiling_name"], e["process_group"][1], e["input_sizes"], e["collective_seq_id"]) for e in entries]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_entries_name_the_backend_and_the_call(backend: str) -> None:
    for entries in run_ranks(body, 2, backend):
        names = [name for name, *_ in entries]
        assert names[:2] == [f"{backend}:all_reduce", f"{backend}:broadcast"]
        assert names[-1] == f"{backend}:barrier" and any("reduce_scatter" in name for name in names), names
        assert entries[0][1:3] == ("default_pg", [[10]]) and entries[1][2] == [[2, 3]]
        world = [sequence for _, group, _, sequence in entries if group == "default_pg"]
        assert world == sorted(world)
