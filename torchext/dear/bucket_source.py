"""A bucket source gives ``attach`` the buckets of a plan that was made before training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from torchext import _C

__all__ = ["BucketSource"]


@runtime_checkable
class BucketSource(Protocol):
    """A plan with buckets for ``dear``: a ``SyncPlan`` of :mod:`torchext.auto`."""

    def dear_buckets(
        self, model: nn.Module, names: Sequence[str], form: str, transport: str, apart: Collection[str] = ()
    ) -> _C.DearPlan:
        """The buckets, as places in ``names``.

        Args:
            model: The module inside of DDP.
            names: Of the parameters that the optimizers step, in the order of registration.
            form: Of the group's options.
            transport: Likewise.
            apart: Of these names those whose gradients are averaged apart, which are in no bucket.

        Raises:
            ValueError: The plan is of another model, form, transport or way; the message names what differs.
        """
