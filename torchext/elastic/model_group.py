"""The process group of an attached model, which may fail by itself or because another model's workers have lost one."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from torchext.backends import backend_of
from torchext.elastic.membership_round import GRACE, PAUSE

__all__ = ["ModelGroup"]


class ModelGroup:
    """The group that a model has at the time, and the ranks of the world in it.

    Args:
        ddp: The model. Its group may not be one of ours yet; then :meth:`_take` comes first.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._ranks: list[int] = []  # of the world, in the order of those of the group

    def _take(self, group: ProcessGroup) -> None:
        """From now on it is the model's."""
        self._ddp.process_group = group
        self._ranks = dist.get_process_group_ranks(group)

    @property
    def has_failed(self) -> bool:
        """Whether it cannot be used any more, whoever noticed."""
        return bool(backend_of(self._ddp.process_group).failure[1])

    def error(self) -> Exception:
        """What a model raises whose group has failed, where it was not the model that noticed."""
        backend = backend_of(self._ddp.process_group)
        text = f"{backend.name()}: the group of an attached model has failed: {backend.failure[1]}"
        error: Exception = dist.DistBackendError(text)
        return error

    def fail(self, error: BaseException) -> None:
        """Ends it, if it has not failed already: by a timeout, say, which the others must learn of."""
        if not self.has_failed:
            backend_of(self._ddp.process_group).abort_with_reason(str(error))

    def has(self, ranks: Collection[int]) -> bool:
        """Whether one of these ranks of the world is in it."""
        return not set(ranks).isdisjoint(self._ranks)

    def lose(self, ranks: Collection[int]) -> None:
        """Returns when it has failed, for want of those of these ranks of the world that are in it.

        It finds that out by itself, as a rule, and then knows more of it than another model's workers.
        """
        end = time.monotonic() + GRACE
        while not self.has_failed and time.monotonic() < end:
            time.sleep(PAUSE)
        if not self.has_failed:
            lost = next(position for position, rank in enumerate(self._ranks) if rank in ranks)
            reason = f"rank {lost} is gone, as the workers of another model have found"
            backend_of(self._ddp.process_group)._abort_because_of(lost, reason)
