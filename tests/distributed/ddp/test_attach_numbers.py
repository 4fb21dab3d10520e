"""Numbers of NumPy and tensors without dimensions, given to attach and to a synchronizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attached import new_group
from harness import Rank, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext


def body(rank: Rank, backend: str) -> bool:
    rank.init("gloo")
    kinds: tuple[tuple[Any, Any], ...] = ((np.int64, np.float64), (np.int32, np.float32), (torch.tensor, torch.tensor))
    for whole, real in kinds:
        ddp = DistributedDataParallel(nn.Linear(4, 1), process_group=new_group(backend))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        sync = torchext.attach(ddp, optimizer, bucket_mb="auto" if backend == "hop" else real(0.5))
        for _ in range(2):
            ddp(torch.ones(2, 4)).sum().backward()
            sync.clip_grad_norm_(real(0.5))
            optimizer.step()
            optimizer.zero_grad()
        sync.synchronize()
        sync.load_state_dict({"version": whole(1), "steps": whole(2)})
        with pytest.raises(ValueError, match="steps must be an int"):
            sync.load_state_dict({"version": 1, "steps": real(2.0)})
        with pytest.raises(ValueError, match="steps must be an int"):
            sync.load_state_dict({"version": 1, "steps": np.bool_(True)})
        sync.detach()
    return True


@pytest.mark.parametrize("backend", ["prague", "hop", "dssync", "dear"])
def test_numbers_of_others(backend: str) -> None:
    assert run_ranks(body, 2, backend) == [True, True]
