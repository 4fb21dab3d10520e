"""Averaged buffers that a forward pass assigns anew: ``self.ema = 0.9 * self.ema + 0.1 * x``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["ReassignedBuffers"]


class ReassignedBuffers:
    """Puts a model's buffers back where they were when it was attached, with the values that were assigned since.

    What is averaged is memory, and would be that of a tensor which the model no longer has.

    Args:
        module: The model.
        tensors: What is averaged, its buffers among it.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        averaged = {id(tensor) for tensor in tensors}
        self._places = [
            (owner, name, f"{path}.{name}" if path else name, buffer)
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and id(buffer) in averaged
        ]

    def drop_assigned(self) -> None:
        """Puts them back, and what was assigned since is forgotten."""
        for owner, name, _, kept in self._places:
            owner._buffers[name] = kept

    @torch.no_grad()
    def restore(self) -> None:
        """Does it.

        Raises:
            RuntimeError: A buffer has another shape, dtype or device than it had, or is gone.
        """
        for owner, name, path, kept in self._places:
            now = owner._buffers.get(name)
            if now is kept:
                continue
            if now is None or (now.shape, now.dtype, now.device) != (kept.shape, kept.dtype, kept.device):
                said = "nothing" if now is None else f"{tuple(now.shape)}, {now.dtype}, {now.device}"
                raise RuntimeError(
                    f"buffer {path} has been given other memory since torchext.attach: it is {said}; workers average "
                    f"{tuple(kept.shape)}, {kept.dtype}, {kept.device}. Change a model before it is wrapped in "
                    "DistributedDataParallel and attached"
                )
            kept.copy_(now)
            owner._buffers[name] = kept
