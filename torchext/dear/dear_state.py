"""The state of an optimizer whose model is trained by "dear": moved, saved and loaded while its parameters change."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext.ddp.step_hooks import unhooked_step
from torchext.dear.dear_refusals import ELEMENTWISE
from torchext.dear.state_loading import agreed_states
from torchext.dear.state_slices import StateSlices

__all__ = ["DearState", "groups_of", "in_order"]


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


class DearState:
    """The state that an optimizer keeps of a model's parameters: whole, or this rank's slices of it.

    ``state_dict()`` is that of the plain optimizer (in the sharded form collective), and ``load_state_dict()`` takes
    one. States are mappings from names to values, by position of the parameter among the model's.

    Args:
        core: The C++ synchronizer.
        optimizer: Has its own, whole state.
        parameters: The model's, in registration order.
        group: To gather state over.
        apart: Positions of parameters that every rank steps whole, in the sharded form, too.
    """

    def __init__(
        self,
        core: _C.DearSynchronizer,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        apart: Collection[int] = (),
    ) -> None:
        self._core, self._optimizer, self._group = core, optimizer, group
        self._parameters = list(parameters)
        self._position = {id(parameter): position for position, parameter in enumerate(parameters)}
        # Those frozen later are stepped as long as they have gradients, and keep their state.
        self._stepped = {position for position, parameter in enumerate(parameters) if parameter.requires_grad}
        self._apart = frozenset(apart)
        self._slices = None if core.replicated else StateSlices(parameters, group)
        self._whole = True
        self._parts: dict[int, nn.Parameter] = {}  # by position: what is stepped of a parameter
        self._handles = [
            optimizer.register_state_dict_post_hook(self._complete),
            optimizer.register_load_state_dict_pre_hook(self._accept),
        ]

    @property
    def sharded(self) -> bool:
        """Whether each rank is to step its slices, but under plain all-reduce."""
        return self._slices is not None

    @property
    def is_sliced(self) -> bool:
        """Whether there is state of which this rank has a slice alone."""
        states = self._states()
        values = (value for position in states.keys() - self._apart for value in states[position].values())
        return not self._whole and any(isinstance(value, torch.Tensor) and value.dim() for value in values)

    def hold(self, whole: bool) -> None:
        """Makes the state whole, or this rank's slices. Local; but where slices become whole, collective."""
        if self._slices is None or whole == self._whole:
            return
        states = self._whole_states()
        self._whole = whole
        for position, values in states.items():
            self._optimizer.state[self._parameters[position]] = self._cut(values, position)

    def forget(self) -> None:
        """Drops it: other ranks cannot be reached, who have slices, or have taken another step."""
        for _, parameter in self._trained():
            self._optimizer.state.pop(parameter, None)
        self._whole = True

    def moved(self, positions: Iterable[int]) -> None:
        """These parameters have been given other memory."""
        for position in positions:
            self._parts.pop(position, None)

    @contextlib.contextmanager
    def as_slices(self) -> Iterator[Callable[[torch.Tensor], int | None]]:
        """Inside, the optimizer holds this rank's slices of the parameters, with the state of them.

        Yields:
            What tells the position of the parameter of a slice.
        """
        optimizer = self._optimizer
        params = [group["params"] for group in optimizer.param_groups]
        cut = ((position, parameter) for position, parameter in self._trained() if position not in self._apart)
        parts = {id(parameter): self._part(position) for position, parameter in cut}
        own = {id(part): self._parameters[position] for position, part in self._parts.items()}
        for group in optimizer.param_groups:
            group["params"] = [parts.get(id(parameter), parameter) for parameter in group["params"]]
        _replace_keys(optimizer.state, parts)
        positions = {id(part): position for position, part in self._parts.items()}
        groups, kept = list(optimizer.param_groups), len(optimizer.state)
        try:
            yield lambda part: positions.get(id(part))
        finally:
            for group, held in zip(groups, params, strict=True):
                group["params"] = held
            _replace_keys(optimizer.state, own)
            if len(optimizer.state) != kept:
                in_order(optimizer)
            for part in parts.values():
                part.grad = None

    def part_of(self, position: int) -> nn.Parameter:
        """What is stepped of a parameter."""
        return self._parts[position]

    def versions(self) -> list[int]:
        """Numbers that tell whether what is stepped has been written."""
        return [part._version for part in self._parts.values()]

    @property
    def parts(self) -> Iterable[int]:
        """The positions of parameters of which there is one; it holds the parameter's memory."""
        return self._parts.keys()

    def _part(self, position: int) -> nn.Parameter:
        if position not in self._parts:
            self._parts[position] = nn.Parameter(self._core.stepped(position))
        return self._parts[position]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def sharded_state(self) -> dict[str, Any]:
        """The state for torch.distributed.checkpoint; see Synchronizer."""
        states = self._states() or self._first_states()
        if self._slices is None:
            return {f"{position}.{key}": value for position, values in states.items() for key, value in values.items()}
        return self._slices.distributed(self._sliced(states))

    def agreed(self, state: Any) -> dict[int, dict[str, Any]]:
        """What :meth:`sharded_state` gave, checked on all ranks, for :meth:`take`. Collective."""
        trained = {position for position, _ in self._trained()}
        return agreed_states(state, trained, self._expected, type(self._optimizer) in ELEMENTWISE, self._group)

    def take(self, states: dict[int, dict[str, Any]]) -> None:
        """Takes a state that all ranks have agreed on. Collective."""
        if self._slices is not None:
            held = states if self._whole else {at: states[at] for at in sorted(states.keys() & self._apart)}
            states = {**states, **self._slices.whole(held)}
        for number, parameter in self._trained():
            if number in states:
                self._optimizer.state[parameter] = states[number]

    def _expected(self, positions: Collection[int]) -> dict[int, dict[str, Any]]:
        """This rank's part of the state of parameters, as it is or as the first step will make it. Local."""
        states = self._states()
        if type(self._optimizer) in ELEMENTWISE and not all(position in states for position in positions):
            states = {**self._first_states(), **states}
        return self._sliced(states)

    def _is_cut(self, position: int) -> bool:
        """Whether the optimizer has this rank's slice of that parameter's state."""
        return self._slices is not None and not self._whole and position not in self._apart

    def _sliced(self, states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """States as the optimizer has them, as slices; in the replicated form as they are."""
        if self._slices is None:
            return states
        slices = self._slices
        return {at: values if self._is_cut(at) else slices.cut(values, at) for at, values in states.items()}

    def _cut(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        if self._slices is None or not self._is_cut(position):
            return dict(values)
        return self._slices.cut(values, position)

    def _trained(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What the optimizer holds of the model, with positions."""
        for parameter in self._order():
            position = self._position.get(id(parameter))
            if position in self._stepped:
                yield position, parameter

    def _states(self) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps of them, by position."""
        state = self._optimizer.state
        return {position: dict(state[parameter]) for position, parameter in self._trained() if parameter in state}

    def _whole_states(self) -> dict[int, dict[str, Any]]:
        """The same, whole. Where it is in slices, collective."""
        states = self._states()
        if self._slices is None or self._whole:
            return states
        return {**states, **self._slices.whole({at: kept for at, kept in states.items() if self._is_cut(at)})}

    def _first_states(self) -> dict[int, dict[str, Any]]:
        """What the first step creates, to load into: by a step with zero gradients on tensors that are thrown away."""
        optimizer = self._optimizer
        if type(optimizer) not in ELEMENTWISE:
            raise RuntimeError(
                f"dear: {type(optimizer).__name__} has no state yet, and only for the elementwise optimizers of "
                "torch.optim is it known what the first step creates; take a step before "
                "sync.optimizer_state_dict(), then load parameters and state"
            )
        zeros = {p: _zeros(self._core.stepped(at) if self._is_cut(at) else p) for at, p in self._trained()}
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
        self._slices.meet(lambda: self._core.others_train_on())
        return self._translated(state_dict, self._whole_states())

    def _accept(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Before optimizer.load_state_dict(): a whole state becomes this rank's slices."""
        if self._slices is None or self._whole:
            return None
        given = state_dict["state"]
        cut = {
            position: self._cut(given[key], position)
            for key, position in self._positions_in(state_dict).items()
            if key in given
        }
        return self._translated(state_dict, cut)

    def _order(self) -> list[torch.Tensor]:
        """By the numbers that a state_dict gives parameters."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _translated(self, state_dict: dict[str, Any], states: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The state_dict with these states in the places of what the optimizer steps."""
        state = dict(state_dict["state"])
        for key, position in self._positions_in(state_dict).items():
            if position in states:
                state[key] = states[position]
        return {**state_dict, "state": state}

    def _positions_in(self, state_dict: dict[str, Any]) -> dict[Any, int]:
        """By what a state_dict calls a parameter: a number, or a name where torch.distributed.checkpoint has loaded."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        named = zip(keys, self._order(), strict=False)  # torch itself refuses others
        found = ((key, self._position.get(id(parameter))) for key, parameter in named)
        return {key: position for key, position in found if position is not None}


def _replace_keys(state: Any, others: Mapping[int, torch.Tensor]) -> None:
    """Puts what is kept of some tensors under others, by the ids of the former."""
    for key in [key for key in state if id(key) in others]:
        state[others[id(key)]] = state.pop(key)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(parameter, requires_grad=True)
    zeros.grad = torch.zeros_like(zeros)
    return zeros


def _like(state: Any) -> Any:
    """An empty mapping of the kind that optimizers use."""
    return collections.defaultdict(state.default_factory) if hasattr(state, "default_factory") else type(state)()
