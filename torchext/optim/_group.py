"""The process group of K-FAC's own, and what its ranks tell each other before there is an engine."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext._regroup import NAMED_BY_COUNTING

__all__ = ["agree_that_all_can", "end", "end_after", "own_group"]

_ending: list[list[dist.ProcessGroup]] = []


def own_group(model: nn.Module, group: dist.ProcessGroup | None, on_cuda: bool) -> dist.ProcessGroup | None:
    """A group for K-FAC alone over the same ranks, so that its collectives never mix with DDP's.

    Gloo, and NCCL beside it for what lies on a GPU: what the host decides by need not wait for the device then. It
    waits for a rank as long as the group of the same ranks does.
    """
    if group is None and isinstance(model, DistributedDataParallel):
        group = model.process_group
    if not dist.is_available() or not dist.is_initialized():
        return None
    beside = group if group is not None else dist.distributed_c10d._get_default_group()
    ranks = dist.get_process_group_ranks(beside)
    if len(ranks) < 2:
        return None
    some = len(ranks) < dist.get_world_size()
    backend = "cpu:gloo,cuda:nccl" if on_cuda and dist.is_nccl_available() else "gloo"
    own = dist.new_group(ranks, timeout=_timeout_of(beside), backend=backend, use_local_synchronization=some)
    assert isinstance(own, dist.ProcessGroup)
    return own


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend = group._get_backend(group._device_types[0])
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return backend.options._timeout


def end_after(owner: object, group: dist.ProcessGroup | None) -> None:
    """Has the Gloo group of :func:`own_group` end when its one user is gone, whenever that is on other ranks."""
    if group is not None:
        weakref.finalize(owner, _end, [group]).atexit = False


def end(group: dist.ProcessGroup | None) -> None:
    """Has its connections closed and its threads ended once nobody uses it. Local: no other rank need do so."""
    if group is not None:
        _end([group])


def _end(holds: list[dist.ProcessGroup]) -> None:
    if NAMED_BY_COUNTING:  # it lasts as long as the process
        return
    if dist.is_initialized():
        with contextlib.suppress(ValueError):  # with all groups, already
            dist.destroy_process_group(holds[0])
    # Its destructor waits for what is on its way, and the other ranks may never send their part. No threading.Thread:
    # this may be the garbage collector, called where that module's locks are held.
    _ending.append(holds)
    _thread.start_new_thread(_destroy, (holds,))


def _destroy(holds: list[dist.ProcessGroup]) -> None:
    try:
        holds.clear()
    finally:
        del _ending[next(place for place, other in enumerate(_ending) if other is holds)]


@atexit.register
def _await_ends() -> None:
    """A thread that the interpreter ends inside a destructor would end the process with an error."""
    limit = time.monotonic() + 5
    while _ending and time.monotonic() < limit:
        time.sleep(0.01)


def agree_that_all_can(group: dist.ProcessGroup | None, failure: Exception | None) -> None:
    """Raises on every rank if one of them has failed."""
    if group is not None:
        failed = torch.tensor([failure is not None], dtype=torch.int32)
        gathered = [torch.empty_like(failed) for _ in range(group.size())]
        dist.all_gather(gathered, failed, group=group)
        ranks = [rank for rank, flag in enumerate(gathered) if flag.item()]
        if failure is None and ranks:
            raise RuntimeError(f"torchext.optim: rank {ranks[0]} could not build its optimizer; its own error says why")
    if failure is not None:
        raise failure
