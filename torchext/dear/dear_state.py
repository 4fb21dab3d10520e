"""The state of an optimizer whose model is trained by "dear": moved, saved and loaded while its parameters change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext.dear.dear_refusals import ELEMENTWISE
from torchext.dear.optimizer_state import OptimizerState
from torchext.dear.parameter_slices import ParameterSlices
from torchext.dear.state_loading import agreed_states
from torchext.dear.state_slices import StateSlices

__all__ = ["DearState"]


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
        self._apart = frozenset(apart)
        self._kept = OptimizerState(optimizer, parameters)
        self.parts = ParameterSlices(core, optimizer, self._kept, self._apart)  # what is stepped in the sharded form
        self._slices = None if core.replicated else StateSlices(parameters, group)
        self._whole = True
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
        states = self._kept.states()
        values = (value for position in states.keys() - self._apart for value in states[position].values())
        return not self._whole and any(isinstance(value, torch.Tensor) and value.dim() for value in values)

    def hold(self, whole: bool) -> None:
        """Makes the state whole, or this rank's slices. Local; but where slices become whole, collective."""
        if self._slices is None or whole == self._whole:
            return
        states = self._whole_states()
        self._whole = whole
        self._kept.put({position: self._cut(values, position) for position, values in states.items()})

    def forget(self) -> None:
        """Drops it: other ranks cannot be reached, who have slices, or have taken another step."""
        self._kept.forget()
        self._whole = True

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def sharded_state(self) -> dict[str, Any]:
        """The state for torch.distributed.checkpoint; see Synchronizer."""
        states = self._kept.states() or self._kept.first(self._stepped)
        if self._slices is None:
            return {f"{position}.{key}": value for position, values in states.items() for key, value in values.items()}
        return self._slices.distributed(self._sliced(states))

    def agreed(self, state: Any) -> dict[int, dict[str, Any]]:
        """What :meth:`sharded_state` gave, checked on all ranks, for :meth:`take`. Collective."""
        trained = {position for position, _ in self._kept.trained()}
        return agreed_states(state, trained, self._expected, type(self._optimizer) in ELEMENTWISE, self._group)

    def take(self, states: dict[int, dict[str, Any]]) -> None:
        """Takes a state that all ranks have agreed on. Collective."""
        if self._slices is not None:
            held = states if self._whole else {at: states[at] for at in sorted(states.keys() & self._apart)}
            states = {**states, **self._slices.whole(held)}
        self._kept.put(states)

    def _expected(self, positions: Collection[int]) -> dict[int, dict[str, Any]]:
        """This rank's part of the state of parameters, as it is or as the first step will make it. Local."""
        states = self._kept.states()
        if type(self._optimizer) in ELEMENTWISE and not all(position in states for position in positions):
            states = {**self._kept.first(self._stepped), **states}
        return self._sliced(states)

    def _is_cut(self, position: int) -> bool:
        """Whether the optimizer has this rank's slice of that parameter's state."""
        return self._slices is not None and not self._whole and position not in self._apart

    def _stepped(self, position: int, parameter: torch.Tensor) -> torch.Tensor:
        """What is stepped of a parameter."""
        return self._core.stepped(position) if self._is_cut(position) else parameter

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

    def _whole_states(self) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps, whole. Where it is in slices, collective."""
        states = self._kept.states()
        if self._slices is None or self._whole:
            return states
        return {**states, **self._slices.whole({at: kept for at, kept in states.items() if self._is_cut(at)})}

    def _complete(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """After optimizer.state_dict(): slices become whole again."""
        if self._slices is None or self._whole:
            return None
        self._core.wait_all()
        self._slices.meet(lambda: self._core.others_train_on())
        return self._kept.translated(state_dict, self._whole_states())

    def _accept(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Before optimizer.load_state_dict(): a whole state becomes this rank's slices."""
        if self._slices is None or self._whole:
            return None
        given = self._kept.given(state_dict)
        cut = {position: self._cut(values, position) for position, values in given.items()}
        return self._kept.translated(state_dict, cut)
