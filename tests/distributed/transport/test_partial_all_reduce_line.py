"""partial_all_reduce over a line that is slower than memory: its segments travel in another order there."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from harness import Rank
from lab_hosts import netlab, run_on

import torchext

pytestmark = pytest.mark.sanitize


def sample(of: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(60).add(37 * of).remainder(60).to(dtype)  # sums of four are exact in every dtype
    return values.repeat(numel // 60 + 1)[:numel]


def body_values(rank: Rank) -> list[tuple[int, int, float]]:
    """Of each call: how many took part, how many values are wrong, bytes a second."""
    rank.init("prague")
    backend, results = torchext.backend_of(), []
    assert backend.shared_memory_ranks == [rank.rank], "hosts do not share memory"
    for members in ([0, 1], [2, 3], [0, 2, 3], [0, 1, 2, 3]):
        # Segments: one, a few, more than are received ahead, and a number that no chunk divides evenly.
        for numel, dtype in ((600_000, torch.float32), (5_000_001, torch.float32), (2_000_003, torch.bfloat16)):
            dist.barrier()
            if rank.rank not in members:
                continue
            expected = sum(sample(of, numel, torch.float32) for of in members) / len(members)
            for _ in range(2):  # the line is known from the first on
                tensor = sample(rank.rank, numel, dtype)
                start = time.perf_counter()
                backend.partial_all_reduce(tensor, members).wait()
                seconds = time.perf_counter() - start
                # A third is rounded, and so is what it is multiplied with.
                wrong = int(((tensor.float() - expected).abs() > torch.finfo(dtype).eps * expected).sum())
                results.append((len(members), wrong, tensor.nbytes / seconds))
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.skipif(netlab.missing() is not None, reason=f"network namespaces: {netlab.missing()}")
def test_values() -> None:
    with netlab.NetLab(4, rate="1gbit") as lab:
        results = run_on(lab, body_values)
    assert [len(lines) for lines in results] == [18, 12, 18, 18]
    for lines in results:
        for members, wrong, bytes_per_second in lines:
            assert wrong == 0, members
            assert bytes_per_second < 4e8, "this is no line, TransferTuning.line_bytes_per_second says"
