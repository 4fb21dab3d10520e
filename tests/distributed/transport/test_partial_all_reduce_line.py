"""partial_all_reduce over a line that is slower than memory: its segments travel in another order there."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_hosts import netlab, run_on

pytestmark = pytest.mark.sanitize

SCRIPT = """
import json, os, time
import torch
import torch.distributed as dist
import torchext

dist.init_process_group("prague")
backend, rank = torchext.backend_of(), dist.get_rank()
assert backend.shared_memory_ranks == [rank], "hosts do not share memory"

def sample(of, numel, dtype):
    return torch.arange(numel).add(37 * of).remainder(60).to(dtype)  # sums of four are exact in every dtype

for members in ([0, 1], [2, 3], [0, 2, 3], [0, 1, 2, 3]):
    # Segments: one, a few, more than are received ahead, and a number that no chunk divides evenly.
    for numel, dtype in ((600_000, torch.float32), (8_000_001, torch.float32), (5_000_003, torch.bfloat16)):
        dist.barrier()
        if rank not in members:
            continue
        expected = sum(sample(of, numel, torch.float32) for of in members) / len(members)
        for _ in range(3):  # the line is known from the first on
            tensor = sample(rank, numel, dtype)
            start = time.perf_counter()
            backend.partial_all_reduce(tensor, members).wait()
            seconds = time.perf_counter() - start
            # A third is rounded, and so is what it is multiplied with.
            wrong = int(((tensor.float() - expected).abs() > torch.finfo(dtype).eps * expected).sum())
            print(json.dumps([len(members), wrong, tensor.nbytes / seconds]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(netlab.missing() is not None, reason=f"network namespaces: {netlab.missing()}")
def test_values(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with netlab.NetLab(4, rate="1gbit") as lab:
        results = run_on(lab, script)
    assert [len(lines) for lines in results] == [27, 18, 27, 27]
    for lines in results:
        for members, wrong, bytes_per_second in lines:
            assert wrong == 0, members
            assert bytes_per_second < 4e8, "this is no line, TransferTuning.line_bytes_per_second says"
