"""PlainSynchronizer stands in a synchronizer's place where DistributedDataParallel alone trains a model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchext.base.eager_only import eager_only
from torchext.ddp.synchronizer import Synchronizer
from torchext.ddp.under_way import Arrivals

__all__ = ["PlainSynchronizer"]


class PlainSynchronizer(Synchronizer):
    """Has the methods of any synchronizer, and does nothing: the workers' models are the same after each step.

    A script that was written for an attached model needs no branch. ``stats()`` has ``steps`` and ``mode``, which is
    ``"allreduce"`` as with ``dear`` where that trains as plain DDP. Of several optimizers the first one's steps count.
    """

    def __init__(self, ddp: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        core: Any = _NothingToDo()
        super().__init__(core, ddp, optimizers, _NothingUnderWay(()))
        counted = weakref.ref(core)  # not the synchronizer, which holds the optimizer

        @eager_only("torchext: steps are counted")
        def count(*_: Any) -> None:
            found = counted()
            if found is not None:
                found.steps += 1

        self._handles.append(optimizers[0].register_step_post_hook(count))

    def stats(self) -> dict[str, Any]:  # noqa: D102  # inherited
        return {"steps": self._core.steps, "mode": "allreduce"}

    def _is_active(self) -> bool:
        return False  # for those who look for attached models

    def _abandon(self) -> None:
        pass  # an optimizer may be attached after this

    def _wait_in_front(self, needed: bool) -> None:
        pass

    def _steps_inside(self) -> bool:
        return False


class _NothingToDo:
    """A synchronizer's C++ side."""

    def __init__(self) -> None:
        self.steps = 0

    def wait_tensors(self, tensors: Sequence[int]) -> None:
        pass

    def wait_all(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def leave(self, limit: timedelta) -> None:
        pass


class _NothingUnderWay(Arrivals):
    def arrive_all(self, positions: Sequence[int]) -> None:  # inherited
        pass
