"""dssync and prague find the racks of a network: hosts (namespaces) behind two switches and a slow link."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank
from lab_hosts import netlab, run_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext


def body_attached_twice(rank: Rank, backend: str) -> list[Any]:
    """How often racks were measured at each `attach`, and what is known of them then."""
    rank.init(backend)
    found = []
    for _ in range(2):  # the second time nothing is measured
        ddp = DistributedDataParallel(nn.Linear(4, 1))
        with torch.profiler.profile() as profile:
            sync = torchext.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
        measured = sum(event.key == "torchext::measure_racks" for event in profile.key_averages())
        found.append((measured, torchext.backend_of().topology))
        sync.detach()
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(netlab.missing() is not None, reason=f"network namespaces: {netlab.missing()}")
@pytest.mark.parametrize(("backend", "racks"), [("dssync", 1), ("dssync", 2), ("prague", 2)])
def test_the_racks_are_found(backend: str, racks: int) -> None:
    with netlab.NetLab(4, rate="400mbit", racks=racks, uplink="50mbit") as lab:
        results = run_on(lab, body_attached_twice, backend)
        expected = [lab.rack(host) for host in range(4)]
    for rank, ((first, topology), (second, again)) in enumerate(results):
        assert topology == again == results[0][0][1]  # the same on every rank
        assert topology["racks"] == expected, topology
        assert (first, second) == (1, 0), rank
        if racks > 1:
            # Bytes a second: never more than the link, and closer to it than to the other kind.
            assert 15e6 < topology["host_bandwidth"] < 60e6, topology
            assert all(2e6 < uplink < 10e6 for uplink in topology["uplink_bandwidth"]), topology
