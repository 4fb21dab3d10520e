"""The state of an optimizer whose model is trained by "dear": moved, saved and loaded while its parameters change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext._dear_parameter import SteppedParameter
from torchext._dear_refusals import ELEMENTWISE, refuse_checkpoint_functions
from torchext._given_state import agreed_states
from torchext._state_slices import StateSlices
from torchext._step_hooks import unhooked_step

__all__ = ["DearState", "groups_of"]


def groups_of(groups: Iterable[dict[str, Any]], chosen: Container[int]) -> list[dict[str, Any]]:
    """Param groups for a step of the SteppedParameters at these positions alone."""
    return [{**group, "params": [p for p in group["params"] if _position(p) in chosen]} for group in groups]


class DearState:
    """The state that an optimizer keeps of a model's parameters, or of the SteppedParameters in their places.

    ``state_dict()`` is that of the plain optimizer (in the sharded form collective), and ``load_state_dict()`` takes
    one. States are mappings from names to values, by position of the parameter among the model's.

    Args:
        core: The C++ synchronizer.
        optimizer: Has no SteppedParameters yet.
        parameters: The model's, in registration order.
        group: To gather state over.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
    ) -> None:
        self._core, self._optimizer, self._group = core, optimizer, group
        self._position = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._slices = None if core.replicated else StateSlices(parameters, group)
        self._whole = True
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: refuse_checkpoint_functions()),
            optimizer.register_state_dict_post_hook(self._complete),
            optimizer.register_load_state_dict_pre_hook(self._accept),
        ]

    @property
    def sharded(self) -> bool:
        """Whether the optimizer is to hold slices, but under plain all-reduce."""
        return self._slices is not None

    @property
    def whole(self) -> bool:
        """Whether what the optimizer holds now are whole parameters."""
        return self._whole

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the model's parameters."""
        return id(parameter) in self._position

    def position_of(self, held: torch.Tensor) -> int | None:
        """Of what the optimizer holds: the position of the model's parameter that it is or stands for."""
        return held.position if isinstance(held, SteppedParameter) else self._position.get(id(held))

    def move(self, other: Callable[[torch.Tensor], torch.Tensor], whole: bool, with_state: bool = True) -> None:
        """Has the optimizer hold something else, with the state of it. Where state is in slices, collective.

        Args:
            other: What to hold instead of what is held now; called when :attr:`whole` is the new one.
            whole: Whether that are whole parameters.
            with_state: False: without state, for when the others cannot be reached.
        """
        states = self._whole_states() if with_state else {}
        self._whole = whole
        self._optimizer.state, before = _like(self._optimizer.state), self._optimizer.state
        # What an optimizer keeps beside, a counter say.
        self._optimizer.state.update({key: kept for key, kept in before.items() if not isinstance(key, torch.Tensor)})
        for group in self._optimizer.param_groups:
            group["params"] = [other(parameter) for parameter in group["params"]]
        for parameter in self._order():
            position = self.position_of(parameter)
            if parameter in before:
                self._optimizer.state[parameter] = before[parameter]  # was not replaced
            elif position is not None and position in states:
                self._optimizer.state[parameter] = self._cut(states[position], position)

    def remove(self) -> None:
        """Takes the hooks off, once the parameters have been given back."""
        for handle in self._handles:
            handle.remove()

    def sharded_state(self) -> dict[str, Any]:
        """The state for torch.distributed.checkpoint; see Synchronizer."""
        states = self._states() or self._first_states()
        if self._slices is None:
            return {f"{position}.{key}": value for position, values in states.items() for key, value in values.items()}
        if self._whole:
            states = {position: self._slices.cut(values, position) for position, values in states.items()}
        return self._slices.distributed(states)

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Takes the values of :meth:`sharded_state`, on all ranks or on none. Collective."""
        trained = {position for position, _ in self._trained()}
        states = agreed_states(state, trained, self._expected, type(self._optimizer) in ELEMENTWISE, self._group)
        if self._slices is not None and self._whole:
            states = self._slices.whole(states)
        for number, parameter in self._trained():
            if number in states:
                self._optimizer.state[parameter] = states[number]

    def _expected(self, positions: Collection[int]) -> dict[int, dict[str, Any]]:
        """This rank's part of the state of parameters, as it is or as the first step will make it. Local."""
        states = self._states()
        if type(self._optimizer) in ELEMENTWISE and not all(position in states for position in positions):
            states = {**self._first_states(), **states}
        if self._slices is not None and self._whole:
            states = {position: self._slices.cut(values, position) for position, values in states.items()}
        return states

    def _cut(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        return dict(values) if self._slices is None or self._whole else self._slices.cut(values, position)

    def _trained(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What the optimizer holds of the model, SteppedParameters or not, with their positions."""
        for parameter in self._order():
            position = self.position_of(parameter)
            if position is not None and parameter.requires_grad:
                yield position, parameter

    def _states(self) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps of them, by position."""
        state = self._optimizer.state
        return {position: dict(state[parameter]) for position, parameter in self._trained() if parameter in state}

    def _whole_states(self) -> dict[int, dict[str, Any]]:
        """The same, whole. Where it is in slices, collective."""
        states = self._states()
        return states if self._slices is None or self._whole else self._slices.whole(states)

    def _first_states(self) -> dict[int, dict[str, Any]]:
        """What the first step creates, to load into: by a step with zero gradients on tensors that are thrown away."""
        optimizer = self._optimizer
        if type(optimizer) not in ELEMENTWISE:
            raise RuntimeError(
                f"dear: {type(optimizer).__name__} has no state yet, and only for the elementwise optimizers of "
                "torch.optim is it known what the first step creates; take a step before "
                "sync.optimizer_state_dict(), then load parameters and state"
            )
        zeros = {parameter: _zeros(parameter) for _, parameter in self._trained()}
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
            for position, parameter in self._trained()
            if zeros[parameter] in created
        }

    def _complete(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """After optimizer.state_dict(): slices become whole again."""
        if self._slices is None or self._whole:
            return None
        self._core.wait_all()
        self._slices.meet()
        return self._translated(state_dict, self._whole_states())

    def _accept(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Before optimizer.load_state_dict(): a whole state becomes this rank's slices."""
        refuse_checkpoint_functions()  # with names for parameters
        if self._slices is None or self._whole:
            return None
        given = state_dict["state"]
        cut = {
            parameter.position: self._cut(given[index], parameter.position)
            for index, parameter in enumerate(self._order())
            if index in given and isinstance(parameter, SteppedParameter)
        }
        return self._translated(state_dict, cut)

    def _order(self) -> list[torch.Tensor]:
        """By the numbers that a state_dict gives parameters."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _translated(self, state_dict: dict[str, Any], states: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The state_dict with these states in the places of what the optimizer steps."""
        state = dict(state_dict["state"])
        for index, parameter in enumerate(self._order()):
            if isinstance(parameter, SteppedParameter) and parameter.position in states:
                state[index] = states[parameter.position]
        return {**state_dict, "state": state}


def _position(held: torch.Tensor) -> int:
    return held.position if isinstance(held, SteppedParameter) else -1


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(parameter.detach()).requires_grad_()
    zeros.grad = torch.zeros_like(zeros)
    return zeros


def _like(state: Any) -> Any:
    """An empty mapping of the kind that optimizers use."""
    return type(state)(state.default_factory) if hasattr(state, "default_factory") else type(state)()
