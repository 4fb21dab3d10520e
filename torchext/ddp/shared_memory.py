"""Memory of tensors that somebody looks at without asking for the tensor."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunctionSubclass

__all__ = ["SharedMemory"]


class SharedMemory:
    """Tells which tensors have memory that others hold, too, whose readers nobody can tell to wait.

    So it is with ``p.data``, ``p.detach()``, ``p.numpy()`` and a ``state_dict()`` that a script has kept from before a
    step, and with one vector of which all parameters are views.

    Args:
        tensors: A model's; several may have memory together.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        with DisableTorchFunctionSubclass():
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        together = collections.Counter(storages)
        self._together = [together[storage] for storage in storages]
        # How often who asks holds it, which is not the same in all versions of torch.
        self._asking = _holders(torch.empty(1, device="cpu")) - 1

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._tensors)

    def held_by_others(self, own: Sequence[int]) -> list[int]:
        """The positions of those.

        Args:
            own: How often the synchronizer itself holds the memory of each tensor.
        """
        with DisableTorchFunctionSubclass():
            return [
                position
                for position, tensor in enumerate(self._tensors)
                if _holders(tensor) > self._asking + self._together[position] * (1 + own[position])
            ]


def _holders(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
