"""The state of an optimizer inside ``averaged()``: the average over all workers, in the place of this worker's own.

Moments that different workers have saved do not belong together: Adam divides one by the root of the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchext import _C

__all__ = ["AVERAGED_DTYPES", "AveragedState"]

# A tensor of a model, or of its optimizer's state, is averaged if it is of one of these.
AVERAGED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# One all-reduce takes so many bytes at most: what it needs of memory besides the averages.
_RUN_BYTES = 32 << 20
_CPU = torch.device("cpu")

_Values = dict[str, Any]
_Kinds = dict[int, dict[str, Any]]  # by position and name; see _kind()


@dataclass
class _Run:
    """Tensors of one dtype and device that one all-reduce averages; the same on all ranks."""

    dtype: torch.dtype
    device: torch.device
    entries: list[tuple[int, str, torch.Size]] = field(default_factory=list)  # position, name, shape
    elements: int = 0


class AveragedState:
    """The average of the states that an optimizer has on the ranks of a group. Making one is collective.

    Tensors are averaged, and a worker that has none for a parameter counts with zeros, as after a first step without a
    gradient. So are numbers and tensors without dimensions, but where all are whole, the largest is taken: they count
    steps. If a parameter's state holds anything else (LBFGS's history, quantized moments), or is of another make on
    other ranks, that of the first rank which has one is taken.

    Args:
        optimizer: It keeps its own state until :meth:`put`.
        parameters: What the workers average; the same on all ranks, in the same order.
        group: Their ranks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        self._optimizer, self._parameters, self._group = optimizer, parameters, group
        self._own: dict[torch.Tensor, Any] = {}  # while the average is in its place
        state: Any = optimizer.state
        own = {position: state[p] for position, p in enumerate(parameters) if state.get(p)}
        with torch.no_grad():
            self._states = self._average(own)

    def put(self) -> None:
        """Has the optimizer hold the average. Local."""
        state: Any = self._optimizer.state
        for position, values in self._states.items():
            parameter = self._parameters[position]
            self._own[parameter] = state.get(parameter)
            state[parameter] = values
        self._states = {}

    def take_back(self) -> None:
        """Has the optimizer hold its own state again, whatever was put in its place meanwhile. Local. Safe twice."""
        state: Any = self._optimizer.state
        for parameter, values in self._own.items():
            if values is None:
                state.pop(parameter, None)
            else:
                state[parameter] = values
        self._own = {}

    def _average(self, own: dict[int, _Values]) -> dict[int, _Values]:
        _C.fault_point("averaged.state")
        kinds = self._of_all_ranks({p: {name: _kind(v) for name, v in values.items()} for p, values in own.items()})
        averaged: dict[int, _Values] = {}
        scalars: list[tuple[int, str]] = []
        runs: list[_Run] = []
        for position in sorted(set().union(*kinds)):
            first = next(rank for rank, of_rank in enumerate(kinds) if position in of_rank)
            kind = kinds[first][position]
            if None in kind.values() or any(of_rank.get(position, kind) != kind for of_rank in kinds):
                averaged[position] = self._of_rank(first, own.get(position))
                continue
            averaged[position] = dict(kind)  # in this order
            for name, (dtype, device_type, shape) in kind.items():
                if shape:
                    device = _CPU if device_type == "cpu" else self._parameters[position].device
                    run = _run_for(runs, dtype, device, shape.numel())
                    run.entries.append((position, name, shape))
                    run.elements += shape.numel()
                else:
                    scalars.append((position, name))
        for run in runs:
            self._average_run(run, own, averaged)
        self._average_scalars(scalars, own, averaged)
        return averaged

    def _of_all_ranks(self, kinds: _Kinds) -> list[_Kinds]:
        """What each rank's state consists of; it is the same as a rule, which a hash tells."""
        digest = int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7], "big")
        told = torch.tensor([digest, -digest], device="cpu")
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        if told[0] == -told[1]:
            return [kinds] * self._group.size()
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, kinds, group=self._group)
        return gathered

    def _of_rank(self, rank: int, values: _Values | None) -> _Values:
        """A rank's state of one parameter, in CPU memory."""
        sent: list[Any] = [torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, values)]
        dist.broadcast_object_list(sent, group=self._group, group_src=rank, device=_CPU)
        of_rank: _Values = sent[0]
        return of_rank

    def _average_run(self, run: _Run, own: dict[int, _Values], averaged: dict[int, _Values]) -> None:
        wide = torch.float64 if run.dtype == torch.float64 else torch.float32
        flat = torch.zeros(run.elements, dtype=wide, device=run.device)
        parts = torch.split(flat, [shape.numel() for _, _, shape in run.entries])
        for part, (position, name, shape) in zip(parts, run.entries, strict=True):
            if position in own:
                part.view(shape).copy_(own[position][name])
        flat /= self._group.size()
        dist.all_reduce(flat, group=self._group)
        for part, (position, name, shape) in zip(parts, run.entries, strict=True):
            # Copies: who saves a view saves all that is behind it.
            averaged[position][name] = part.view(shape).to(run.dtype, copy=True)

    def _average_scalars(
        self, scalars: list[tuple[int, str]], own: dict[int, _Values], averaged: dict[int, _Values]
    ) -> None:
        if not scalars:
            return
        had = [(float(own[position][name]), 1.0) if position in own else (0.0, 0.0) for position, name in scalars]
        values, have = torch.tensor(had, dtype=torch.float64, device="cpu").unbind(1)
        sums = torch.stack([values, have])
        most = torch.stack([values.where(have > 0, -torch.inf), (values != values.round()).double()])
        dist.all_reduce(sums, group=self._group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        agreed = (sums[0] / sums[1]).where(most[1] > 0, most[0])
        for (position, name), value in zip(scalars, agreed.tolist(), strict=True):
            dtype, device_type, _ = averaged[position][name]
            if device_type is None:
                averaged[position][name] = dtype(value)
            else:
                device = _CPU if device_type == "cpu" else self._parameters[position].device
                averaged[position][name] = torch.tensor(value, dtype=dtype, device=device)


def _kind(value: Any) -> tuple[Any, str | None, torch.Size] | None:
    """Dtype (of a number: its type), type of device (None: a number) and shape; None: this cannot be averaged."""
    if type(value) in (int, float):
        return type(value), None, torch.Size()
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return None
    if value.dtype in AVERAGED_DTYPES or (not value.dim() and value.dtype in (torch.int64, torch.int32)):
        return value.dtype, value.device.type, value.shape
    return None


def _run_for(runs: list[_Run], dtype: torch.dtype, device: torch.device, elements: int) -> _Run:
    """Where a tensor goes: into the last run of its kind, or, where that is full, into a new one."""
    last = next((run for run in reversed(runs) if (run.dtype, run.device) == (dtype, device)), None)
    if last is None or (last.elements + elements) * max(4, dtype.itemsize) > _RUN_BYTES:
        last = _Run(dtype, device)
        runs.append(last)
    return last
