"""This rank's slices of parameters, which an optimizer steps in the sharded form of "dear"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchext import _C
from torchext.dear.optimizer_state import OptimizerState, in_order

__all__ = ["ParameterSlices"]


class ParameterSlices:
    """What an optimizer steps in place of parameters: slices, each of which has its parameter's memory.

    It owns the slices that there are, one for each parameter that has been stepped. Only the training thread calls it.

    Args:
        core: The C++ synchronizer.
        optimizer: Holds the parameters.
        state: Its own.
        apart: Positions of parameters that it steps whole.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        optimizer: torch.optim.Optimizer,
        state: OptimizerState,
        apart: Collection[int],
    ) -> None:
        self._core, self._optimizer, self._state, self._apart = core, optimizer, state, apart
        self._slices: dict[int, nn.Parameter] = {}  # by position

    def __getitem__(self, position: int) -> nn.Parameter:
        return self._slices[position]

    @property
    def positions(self) -> Iterable[int]:
        """Of the parameters whose memory a slice has."""
        return self._slices.keys()

    def versions(self) -> list[int]:
        """Numbers that tell whether slices have been written."""
        return [part._version for part in self._slices.values()]

    def moved(self, positions: Iterable[int]) -> None:
        """These parameters have been given other memory."""
        for position in positions:
            self._slices.pop(position, None)

    @contextlib.contextmanager
    def in_param_groups(self) -> Iterator[Callable[[torch.Tensor], int | None]]:
        """Inside, the optimizer holds slices of the parameters, with the state of them.

        Yields:
            What tells the position of the parameter of a slice.
        """
        optimizer = self._optimizer
        params = [group["params"] for group in optimizer.param_groups]
        cut = [(position, parameter) for position, parameter in self._state.trained() if position not in self._apart]
        slices = {id(parameter): self._slice(position) for position, parameter in cut}
        own = {id(slices[id(parameter)]): parameter for _, parameter in cut}
        positions = {id(slices[id(parameter)]): position for position, parameter in cut}
        for group in optimizer.param_groups:
            group["params"] = [slices.get(id(parameter), parameter) for parameter in group["params"]]
        _replace_keys(optimizer.state, slices)
        groups, kept = list(optimizer.param_groups), len(optimizer.state)
        try:
            yield lambda part: positions.get(id(part))
        finally:
            for group, held in zip(groups, params, strict=True):
                group["params"] = held
            _replace_keys(optimizer.state, own)
            if len(optimizer.state) != kept:
                in_order(optimizer)
            for part in slices.values():
                part.grad = None

    def _slice(self, position: int) -> nn.Parameter:
        if position not in self._slices:
            self._slices[position] = nn.Parameter(self._core.stepped(position))
        return self._slices[position]


def _replace_keys(state: Any, others: Mapping[int, torch.Tensor]) -> None:
    """Puts what is kept of some tensors under others, by the ids of the former."""
    for key in [key for key in state if id(key) in others]:
        state[others[id(key)]] = state.pop(key)
