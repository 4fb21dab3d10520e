"""An optimizer's state of a model's parameters, and the order that the optimizer has them in."""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchext.ddp.step_hooks import unhooked_step
from torchext.dear.dear_refusals import ELEMENTWISE

__all__ = ["OptimizerState", "groups_of", "in_order"]


def groups_of(
    groups: Iterable[dict[str, Any]], chosen: Container[int], position_of: Callable[[torch.Tensor], int | None]
) -> list[dict[str, Any]]:
    """Param groups for a step of the parameters at these positions alone."""
    return [{**group, "params": [p for p in group["params"] if position_of(p) in chosen]} for group in groups]


def in_order(optimizer: torch.optim.Optimizer) -> None:
    """Puts state that was made part by part into the order of the parameters, which it has with a whole step."""
    state: Any = optimizer.state
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in state:
                state[parameter] = state.pop(parameter)


class OptimizerState:
    """The state of an optimizer by position: where a parameter is among the model's.

    States are mappings from names to values. It owns the positions; the state is where the optimizer has it.

    Args:
        optimizer: Has the state.
        parameters: The model's, in registration order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._position = {id(parameter): position for position, parameter in enumerate(parameters)}
        # Those frozen later are stepped as long as they have gradients, and keep their state.
        self._stepped = {position for position, parameter in enumerate(parameters) if parameter.requires_grad}

    def trained(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What the optimizer holds of the model, with positions."""
        for parameter in self._order():
            position = self._position.get(id(parameter))
            if position in self._stepped:
                yield position, parameter

    def states(self) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps of them."""
        state = self._optimizer.state
        return {position: dict(state[parameter]) for position, parameter in self.trained() if parameter in state}

    def put(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Has it keep these."""
        for position, parameter in self.trained():
            if position in states:
                self._optimizer.state[parameter] = states[position]

    def forget(self) -> None:
        """Has it keep nothing of them."""
        for _, parameter in self.trained():
            self._optimizer.state.pop(parameter, None)

    def first(self, stepped: Callable[[int, torch.Tensor], torch.Tensor]) -> dict[int, dict[str, Any]]:
        """What the first step creates, to load into: by a step with zero gradients on tensors that are thrown away.

        Args:
            stepped: What is stepped of a parameter.
        """
        optimizer = self._optimizer
        if type(optimizer) not in ELEMENTWISE:
            raise RuntimeError(
                f"dear: {type(optimizer).__name__} has no state yet, and only for the elementwise optimizers of "
                "torch.optim is it known what the first step creates; take a step before "
                "sync.optimizer_state_dict(), then load parameters and state"
            )
        zeros = {parameter: _zeros(stepped(position, parameter)) for position, parameter in self.trained()}
        state, groups = optimizer.state, optimizer.param_groups
        optimizer.state = _like(state)
        optimizer.param_groups = [
            {**group, "params": [zeros[parameter] for parameter in group["params"] if parameter in zeros]}
            for group in groups
        ]
        try:
            unhooked_step(optimizer)(optimizer)
            created = optimizer.state
        finally:
            optimizer.state, optimizer.param_groups = state, groups
        return {
            position: dict(created[zeros[parameter]])
            for position, parameter in self.trained()
            if zeros[parameter] in created
        }

    def given(self, state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The states in a state_dict."""
        state = state_dict["state"]
        return {position: state[key] for key, position in self._positions_in(state_dict).items() if key in state}

    def translated(self, state_dict: dict[str, Any], states: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """The state_dict with these states in the places of what the optimizer steps."""
        state = dict(state_dict["state"])
        for key, position in self._positions_in(state_dict).items():
            if position in states:
                state[key] = states[position]
        return {**state_dict, "state": state}

    def _order(self) -> list[torch.Tensor]:
        """By the numbers that a state_dict gives parameters."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _positions_in(self, state_dict: dict[str, Any]) -> dict[Any, int]:
        """By what a state_dict calls a parameter: a number, or a name where torch.distributed.checkpoint has loaded."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        named = zip(keys, self._order(), strict=False)  # torch itself refuses others
        found = ((key, self._position.get(id(parameter))) for key, parameter in named)
        return {key: position for key, position in found if position is not None}


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(parameter, requires_grad=True)
    zeros.grad = torch.zeros_like(zeros)
    return zeros


def _like(state: Any) -> Any:
    """An empty mapping of the kind that optimizers use."""
    return collections.defaultdict(state.default_factory) if hasattr(state, "default_factory") else type(state)()
