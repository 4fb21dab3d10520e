"""The parameters of a model that is trained by "dear": when they are complete, and what their gradients are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from torchext import _C
from torchext.ddp.under_way import Arrivals, own_gradient, set_own_gradient
from torchext.dear.averaged_gradients import AveragedGradients
from torchext.dear.replicated_gradients import ReplicatedGradients
from torchext.dear.sharded_gradients import ShardedGradients

__all__ = ["DearParameters"]


class DearParameters(Arrivals):
    """Makes a model's parameters look as plain DDP has them, while values and gradients are still on their way.

    Values are under way from the step until they are used. Between a backward pass that averages and the step,
    ``parameter.grad`` is the averaged gradient, which ``averaged`` has.

    Args:
        core: The C++ synchronizer.
        parameters: The model's, in registration order.
        group: To gather gradients over.
        arrive: Waits for the values of the parameters at some positions.
        apart: Positions of parameters that others average: their own gradients are the averaged ones.
    """

    averaged: AveragedGradients

    def __init__(
        self,
        core: _C.DearSynchronizer,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        arrive: Callable[[list[int]], None],
        apart: Collection[int] = (),
    ) -> None:
        super().__init__(parameters)
        self._core, self._parameters, self._wait = core, list(parameters), arrive
        self._trained = [position for position, p in enumerate(parameters) if p.requires_grad]
        self._exchanged = [position for position in self._trained if position not in apart]
        self._values: set[int] = set()  # positions of values under way
        self._raw = False  # an optimizer's own zero_grad() looks, after everything has been cleared
        if core.replicated:
            self.averaged = ReplicatedGradients(core, self._parameters, self._settle_others)
        else:
            self.averaged = ShardedGradients(core, self._parameters, self._settle_others, group)

    def __getitem__(self, position: int) -> nn.Parameter:
        return self._parameters[position]

    def position_of(self, tensor: torch.Tensor) -> int | None:
        """Of one of the model's parameters; None of others."""
        return self._positions.get(id(tensor))

    # ---- Values ----

    def expect_values(self, positions: Iterable[int] | None = None) -> None:
        """These parameters, or all, have been stepped: the results are under way."""
        stepped = self._trained if positions is None else list(positions)
        self._values.update(stepped)
        self.expect(stepped)

    def values_arrived(self, positions: Iterable[int] | None = None) -> None:
        """They have been waited for; None: all."""
        arrived = list(self._values) if positions is None else list(positions)
        self._values.difference_update(arrived)
        self._settle_others(arrived)

    def arrive_all(self, positions: Sequence[int]) -> None:  # inherited
        values = [position for position in positions if position in self._values]
        if values:
            self._wait(values)
            self.values_arrived(values)
        self.averaged.before_use(positions)

    def enter_graph(self, positions: Sequence[int]) -> None:  # inherited
        self.arrive_all(positions)
        self.averaged.forget_spent(positions)

    # ---- Gradients ----

    def reduced(self) -> None:
        """A backward pass that averages is over. On autograd's thread."""
        self.averaged.renew(self._exchanged)
        self.expect(self._exchanged)

    def gradient(self, position: int) -> torch.Tensor | None:  # inherited
        if not self._raw:
            if self.averaged.stands_in(position):
                return self.averaged.gradient(position)
            self._finish_step(position)
        return own_gradient(self._parameters[position])

    def set_gradient(self, position: int, value: torch.Tensor | None) -> None:  # inherited
        if self.averaged.stands_in(position):
            self.averaged.replace(position, value)
        else:
            self._finish_step(position)
            set_own_gradient(self._parameters[position], value)

    @contextlib.contextmanager
    def raw_gradients(self) -> Iterator[None]:
        """Inside, ``.grad`` is the parameters' own, whatever is under way."""
        self._raw = True
        try:
            yield
        finally:
            self._raw = False

    def _finish_step(self, position: int) -> None:
        """Replicated: the step under way needs the own gradient as it is, or makes the averaged one the own."""
        if self._core.replicated and position in self._values:
            self.arrive_all([position])

    def _settle_others(self, positions: Iterable[int]) -> None:
        """Settles those of the parameters of which nothing is under way, nor stands in the gradient's place."""
        self.settle(p for p in positions if p not in self._values and not self.averaged.stands_in(p))
