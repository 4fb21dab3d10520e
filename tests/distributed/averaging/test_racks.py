"""dssync and prague find the racks of a network: hosts (namespaces) behind two switches and a slow link."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_hosts import netlab, run_on

SCRIPT = """
import json
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torchext

dist.init_process_group("BACKEND")
for _ in range(2):  # the second time nothing is measured
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    with torch.profiler.profile() as profile:
        sync = torchext.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    measured = sum(event.key == "torchext::measure_racks" for event in profile.key_averages())
    topology = torchext.backend_of().topology
    print(json.dumps([measured, topology]), flush=True)
    sync.detach()
dist.destroy_process_group()
"""


@pytest.mark.skipif(netlab.missing() is not None, reason=f"network namespaces: {netlab.missing()}")
@pytest.mark.parametrize(("backend", "racks"), [("dssync", 1), ("dssync", 2), ("prague", 2)])
def test_the_racks_are_found(tmp_path: Path, backend: str, racks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("BACKEND", backend))
    with netlab.NetLab(4, rate="400mbit", racks=racks, uplink="50mbit") as lab:
        results = run_on(lab, script)
        expected = [lab.rack(host) for host in range(4)]
    for rank, ((first, topology), (second, again)) in enumerate(results):
        assert topology == again == results[0][0][1]  # the same on every rank
        assert topology["racks"] == expected, topology
        assert (first, second) == (1, 0), rank
        if racks > 1:
            # Bytes a second: never more than the link, and closer to it than to the other kind.
            assert 15e6 < topology["host_bandwidth"] < 60e6, topology
            assert all(2e6 < uplink < 10e6 for uplink in topology["uplink_bandwidth"]), topology
