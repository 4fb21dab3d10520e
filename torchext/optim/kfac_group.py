"""The process group of K-FAC's own, and what its ranks tell each other before there is an engine."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import time
import traceback
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of
from torchext.backends.new_groups import NAMED_BY_COUNTING
from torchext.errors import UnsupportedBackendError

__all__ = [
    "agree_that_all_can",
    "end_after",
    "end_with",
    "group_beside",
    "least_of_ranks",
    "model_backend",
    "own_group",
]

_ending: list[list[Any]] = []


def group_beside(model: nn.Module, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group over whose ranks K-FAC averages: the given one, DDP's, or the default group; None: there is none."""
    if group is None and isinstance(model, DistributedDataParallel):
        group = model.process_group
    if not dist.is_available() or not dist.is_initialized():
        return None
    return group if group is not None else dist.distributed_c10d._get_default_group()


def model_backend(model: nn.Module, beside: dist.ProcessGroup | None) -> _C.DelegatingBackend | None:
    """The backend in whose group the model trains, where that is one of torchext's, which knows of failures."""
    group = model.process_group if isinstance(model, DistributedDataParallel) else beside
    with contextlib.suppress(UnsupportedBackendError):
        return None if group is None else backend_of(group)
    return None


def own_group(beside: dist.ProcessGroup | None, on_cuda: bool) -> dist.ProcessGroup | None:
    """A group for K-FAC alone over the same ranks, so that its collectives never mix with DDP's.

    Gloo, and NCCL beside it for what lies on a GPU: what the host decides by need not wait for the device then. It
    waits for a rank as long as the group of the same ranks does.
    """
    if beside is None:
        return None
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


def end_with(error: BaseException, holds: list[dist.ProcessGroup | None]) -> None:
    """Ends the Gloo group of an optimizer whose making has failed. Local: no other rank need do so.

    Its destructor waits for the other ranks, so it must not run where the error is dropped, which is the script's
    thread. The frames that the error has come through let the group go.

    Args:
        error: what is about to be raised.
        holds: the last reference to the group, which the caller has given up; with None there is no group.
    """
    traceback.clear_frames(error.__traceback__)
    if holds[0] is not None:
        _end(holds)


def _end(holds: list[Any]) -> None:
    if NAMED_BY_COUNTING:  # it lasts as long as the process
        return
    if dist.is_initialized():
        with contextlib.suppress(ValueError):  # with all groups, already
            dist.destroy_process_group(holds[0])
    # Its destructor waits for what is on its way, and the other ranks may never send their part. No threading.Thread:
    # this may be the garbage collector, called where that module's locks are held.
    _ending.append(holds)
    _thread.start_new_thread(_destroy, (holds,))


def _destroy(holds: list[Any]) -> None:
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


def _of_all_ranks(group: dist.ProcessGroup, model: _C.DelegatingBackend | None, value: int) -> list[int]:
    """What each rank has passed. Signals are handled meanwhile, and the end of the model's group is heard of."""
    own = torch.tensor([value], dtype=torch.int64, device="cpu")
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(gathered, own, group=group, async_op=True)
    assert work is not None
    while not work.is_completed():
        if model is not None and model.failure[1]:
            raise dist.DistBackendError(f"torchext.optim: {model.failure[1]}")
        time.sleep(0.0005)
    work.wait()
    return [int(one) for one in gathered]


def least_of_ranks(group: dist.ProcessGroup | None, model: _C.DelegatingBackend | None, value: int) -> int:
    """The least of what the ranks have passed. Collective."""
    return value if group is None else min(_of_all_ranks(group, model, value))


def agree_that_all_can(
    group: dist.ProcessGroup | None, model: _C.DelegatingBackend | None, failure: Exception | None
) -> None:
    """Raises on every rank if one of them has failed. Collective.

    Args:
        group: K-FAC's own.
        model: the backend of the group in which the model trains.
        failure: this rank's.
    """
    if group is not None:
        ranks = [rank for rank, failed in enumerate(_of_all_ranks(group, model, int(failure is not None))) if failed]
        if failure is None and ranks:
            raise RuntimeError(f"torchext.optim: rank {ranks[0]} could not build its optimizer; its own error says why")
    if failure is not None:
        raise failure
