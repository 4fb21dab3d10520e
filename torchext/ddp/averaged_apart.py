"""Parameters that DistributedDataParallel leaves out and somebody else averages.

Their gradients are averages over all ranks when ``backward()`` returns, the same bits everywhere. DDP counts them among
those that it ignores, which are each rank's own otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["average_apart", "averaged_apart"]

_ids: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()


def average_apart(ddp: DistributedDataParallel, parameters: Iterable[torch.Tensor]) -> None:
    """From now on these of the model's parameters are averaged apart, and no others.

    Args:
        ddp: The model, which was told to ignore them.
        parameters: Those.
    """
    _ids[ddp] = frozenset(map(id, parameters))


def averaged_apart(ddp: DistributedDataParallel) -> frozenset[int]:
    """The ids of the model's parameters that are averaged apart."""
    return _ids.get(ddp, frozenset())
