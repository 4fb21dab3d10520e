"""dssync finds the racks of a network by itself: hosts (namespaces) behind two switches and a slow link."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchext

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lab import netlab  # noqa: E402

DEADLINE = 90.0
PORT = 29400  # free for certain: a fresh namespace has all ports to itself

SCRIPT = """
import json
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torchext

dist.init_process_group("dssync", pg_options=torchext.DSSyncOptions(schedule="topology"))
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


def run_on(lab: netlab.NetLab, script: Path) -> list[list[Any]]:
    """What each host's rank printed, line by line."""
    processes = []
    try:
        for rank in range(lab.hosts):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(lab.hosts),
                "MASTER_PORT": str(PORT),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(torchext.__file__).parents[1]),
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                **lab.environment(rank),
            }
            command = [sys.executable, str(script)]
            processes.append(
                lab.popen(rank, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        results = []
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, err
            results.append([json.loads(line) for line in out.splitlines()])
        return results
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.skipif(netlab.missing() is not None, reason=f"network namespaces: {netlab.missing()}")
@pytest.mark.parametrize("racks", [1, 2])
def test_the_racks_are_found(tmp_path: Path, racks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
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
