"""Makes replicas their average where a script that is not to be touched has all ranks meet: at ``dist.barrier()``.

A file that rank 0 writes alone cannot be averaged when it is written, because the other ranks do not come. A barrier is
where they all come, and behind it plain DDP's replicas are the same.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torchext.ddp.synchronizer import Synchronizer, active_synchronizers
from torchext.decentralized.averaging_synchronizer import AveragingSynchronizer
from torchext.integrations.default_group import instead_of

__all__ = ["average_at_barriers", "average_now"]

_averaged: weakref.WeakSet[Synchronizer] = weakref.WeakSet()


def average_at_barriers(synchronizer: Synchronizer) -> None:
    """From now on ``dist.barrier()`` over the model's group first makes all replicas their average, for good.

    With ``dear`` replicas do not differ, and barriers stay what they are.
    """
    if isinstance(synchronizer, AveragingSynchronizer):
        _averaged.add(synchronizer)
        synchronizer._notice.advise("torch.distributed.barrier() in front of it, on every rank, makes all one average")
        _replace_barrier()


def average_now(chosen: Callable[[AveragingSynchronizer], bool]) -> None:
    """Makes the replicas of attached models their average. Collective.

    Whether a replica has changed since is each rank's own knowledge, and so they meet in any case.

    Args:
        chosen: Whether a model is one of them; the same on all ranks.
    """
    for synchronizer in active_synchronizers():
        if not isinstance(synchronizer, AveragingSynchronizer) or not chosen(synchronizer):
            continue
        # Inside averaged() it is the average already; a closure's passes belong to one step.
        if not synchronizer._averaging and not synchronizer._steps_inside():
            synchronizer.synchronize()


@functools.cache
def _replace_barrier() -> None:
    @instead_of("barrier")
    def barrier(original: Callable[..., Any], arguments: inspect.BoundArguments) -> Any:
        if not arguments.arguments.get("async_op", False) and dist.is_initialized():
            group = arguments.arguments.get("group") or dist.group.WORLD
            average_now(lambda synchronizer: synchronizer in _averaged and synchronizer._ddp.process_group is group)
        return original(*arguments.args, **arguments.kwargs)
