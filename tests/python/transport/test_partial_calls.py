"""Calls of partial_all_reduce that one rank can refuse by itself, by the types and the texts that Python sees.

Those that name several ranks: tests/cpp/c10d/transport/subset_allreduce_test.cc.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import torchext


@pytest.fixture
def backend() -> Iterator[Any]:
    dist.init_process_group("prague", store=HashStore(), rank=0, world_size=1)
    yield torchext.backend_of()
    dist.destroy_process_group()


def test_errors_of_one_rank_are_raised_at_once(backend: Any) -> None:
    good = torch.full((4,), 7.0)
    for tensor, members, kind, text in [
        (good, [0, 1], ValueError, r"member 1 is not a rank of this group \(0\.\.0\)"),
        (good, [-1, 0], ValueError, r"member -1 is not a rank"),
        (good, [0, 0], ValueError, "rank 0 is named twice"),
        (good, [], ValueError, "rank 0, is not among the members"),
        (torch.full((4, 4), 7.0).t()[:, ::2], [0], ValueError, r"contiguous.*strides \[1, 8\]"),
        (torch.full((4,), 7), [0], TypeError, r"(?i)float32, float64, float16 or bfloat16.*(long|int64)"),
        (torch.full((4,), True), [0], TypeError, r"(?i)bfloat16.*bool"),
        (torch.full((4,), 7.0).to_sparse(), [0], TypeError, r"(?i)dense.*sparse"),
        (torch.ones(2, device="meta"), [0], ValueError, "CPU tensors, got one on meta"),
    ]:
        with pytest.raises(kind, match=text):
            backend.partial_all_reduce(tensor, members)
    assert good.tolist() == [7.0] * 4
    assert backend.failure == (-1, "")
    backend.partial_all_reduce(good, [0]).wait()
    assert good.tolist() == [7.0] * 4
