"""``dist.shrink_group``: a group of those that are left, with all backends."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, run_ranks
from rows import run_rows
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.backends import BACKENDS

pytestmark = pytest.mark.sanitize

SHRINK_ABORT = 1


def body_shrink(rank: Rank, backend: str) -> Any:
    rank.init(backend)
    kind = dist.group.WORLD.name()
    done = FileStore(str(rank.folder / "done"), -1)
    dist.all_reduce(torch.ones(3))
    if rank.rank == 2:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    error = elapsed_error(lambda: [dist.all_reduce(torch.ones(3)) for _ in range(1_000_000)])
    sizes = []
    # Rank 2 is dead; of what is left, the rank that was 0 goes in good order.
    for excluded in ([2], [0]):
        if dist.get_rank() in excluded:
            return error, sizes
        group = dist.shrink_group(excluded, shrink_flags=SHRINK_ABORT)
        assert group is dist.group.WORLD and torchext.backend_of().name() == backend
        assert group.name() == kind  # as DDP has it, which reads from Gloo what only Gloo has
        tensor = torch.full((1000,), float(rank.rank))
        dist.all_reduce(tensor)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rank.rank)
        sizes.append((dist.get_rank(), dist.get_world_size(), gathered, tensor.unique().tolist()))
        DistributedDataParallel(nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()
        # Who is done aborts the group, which gives another no more than a moment for what it is still at.
        done.set(f"{len(gathered)}/{rank.rank}", "")
        done.wait([f"{len(gathered)}/{other}" for other in gathered])
    dist.destroy_process_group()
    return error, sizes


def test_a_failed_group_shrinks_to_the_living() -> None:
    rows = {backend: (backend,) for backend in sorted(BACKENDS)}
    for backend, outcomes in run_rows(body_shrink, 4, rows, victims={2}, deadline=30).items():
        living = [outcome for outcome in outcomes if outcome.rank != 2]
        assert all(outcome.ok for outcome in living), (backend, living)
        errors, sizes = zip(*(outcome.value for outcome in living), strict=True)
        assert all("rank 2 died" in error[1] for error in errors), (backend, errors)
        three, two = ([0, 1, 3], [4.0]), ([1, 3], [4.0])
        assert sizes[0] == [(0, 3, *three)], (backend, sizes)
        assert sizes[1] == [(1, 3, *three), (0, 2, *two)], (backend, sizes)
        assert sizes[2] == [(2, 3, *three), (1, 2, *two)], (backend, sizes)


def body_shrink_in_order(rank: Rank) -> Any:
    """A group that is well, and a part of the world."""
    rank.init("prague")
    part = dist.new_group([1, 2, 3], backend="prague", pg_options=torchext.PragueOptions(group_size=3))
    if rank.rank == 1:
        with pytest.raises(NotImplementedError, match=r"shrink_group takes no pg_options"):
            dist.shrink_group([1], part, pg_options=torchext.PragueOptions())
    if rank.rank not in (1, 3):
        dist.barrier()
        return None
    shrunk = dist.shrink_group([1], part)
    tensor = torch.full((5,), float(rank.rank))
    dist.all_reduce(tensor, group=shrunk)
    options = torchext.backend_of(shrunk).options
    dist.barrier()  # of the world, which is as it was
    return tensor.tolist(), options.group_size, list(options.global_ranks_in_group)


def test_a_part_of_the_world_shrinks() -> None:
    results = run_ranks(body_shrink_in_order, 4)
    assert results == [None, ([4.0] * 5, 2, [1, 3]), None, ([4.0] * 5, 2, [1, 3])]
