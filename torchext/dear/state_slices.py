"""The state of an optimizer in slices, one a rank, and whole again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchext.backends import backend_of

__all__ = ["StateSlices"]

# State that belongs to the whole parameter. Told from a slice by its shape, but for parameters without dimensions.
_SCALARS = {"step", "eta", "mu", "mu_product"}


class StateSlices:
    """Cuts the state of parameters as DeAR's sharded form cuts the parameters, and gathers it.

    A parameter's elements are counted in memory order; of N elements rank r of n has those of torch.chunk. States are
    mappings from names to values, by position of the parameter.

    Args:
        parameters: The model's.
        group: Whose ranks have the slices.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group
        self._world, self._rank = group.size(), group.rank()

    def cut(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        """This rank's part of the whole state of one parameter."""
        return {key: self._cut(key, value, position) for key, value in values.items()}

    def whole(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """The whole state, from this rank's part. Collective."""
        full = {position: dict(values) for position, values in states.items()}
        pieces: dict[torch.dtype, list[tuple[int, str, torch.Tensor]]] = {}
        for position, values in states.items():
            for key, value in values.items():
                if self._is_slice(value, position):
                    pieces.setdefault(value.dtype, []).append((position, key, value))
        for dtype, entries in pieces.items():
            sizes = [self._each(position) for position, _, _ in entries]
            own = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
            for (_, _, value), place in zip(entries, torch.split(own, sizes), strict=True):
                place[: value.numel()] = value
            everyone = torch.empty(self._world * own.numel(), dtype=dtype, device="cpu")
            dist.all_gather_into_tensor(everyone, own, group=self._group)
            split = torch.split(everyone.view(self._world, -1), sizes, dim=1)
            for (position, key, _), parts in zip(entries, split, strict=True):
                value = torch.empty_like(self._parameters[position], dtype=dtype, requires_grad=False)
                value.as_strided((value.numel(),), (1,)).copy_(parts.reshape(-1)[: value.numel()])
                full[position][key] = value
        return full

    def distributed(self, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """This rank's part as DTensors with one dimension, under ``"<position>.<name>"``."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self._group, self._parameters[0].device.type)
        result: dict[str, Any] = {}
        for position, values in states.items():
            shape = torch.Size([self._parameters[position].numel()])
            for key, value in values.items():
                if self._is_slice(value, position):
                    value = DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))
                result[f"{position}.{key}"] = value
        return result

    def meet(self, others_train_on: Callable[[], bool]) -> None:
        """Returns when all ranks are here. Where one trains on instead, every rank is told, and the group fails.

        A script may ask for the state on rank 0 alone, which would wait for the others, and they for its gradients.

        Args:
            others_train_on: Whether a rank waits for gradients of a step that this one has not begun.

        Raises:
            torch.distributed.DistBackendError: The group has failed.
        """
        if self._world == 1:
            return
        backend = backend_of(self._group)
        arrival = dist.barrier(group=self._group, async_op=True)
        assert arrival is not None
        while not arrival.is_completed():
            if others_train_on():
                backend.abort_with_reason(
                    f"rank {self._rank} waits in optimizer.state_dict(), where all ranks meet in dear's sharded form, "
                    "and another rank trains on; call it on all ranks, or use DeAROptions(form='replicated')"
                )
            time.sleep(0.001)
        try:
            arrival.wait()
        except RuntimeError as error:
            raise type(error)(
                "dear: optimizer.state_dict() is collective in the sharded form: call it on every rank, and save it on "
                f"one ({error})"
            ) from error

    def _each(self, position: int) -> int:
        return -(-self._parameters[position].numel() // self._world)

    def _is_slice(self, value: Any, position: int) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() != 1:
            return False
        each, count = self._each(position), self._parameters[position].numel()
        return value.numel() == max(0, min(each, count - each * self._rank))

    def _cut(self, key: str, value: Any, position: int) -> Any:
        parameter = self._parameters[position]
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        if key in _SCALARS and not value.dim():
            return value
        ordered = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        begin = self._each(position) * self._rank
        return ordered.as_strided((value.numel(),), (1,))[begin : begin + self._each(position)].clone()
