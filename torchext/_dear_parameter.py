"""What stands for a parameter in an optimizer whose model is trained by "dear"."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from torchext._dear_refusals import CHECKPOINT_FUNCTIONS, NOT_COPIED, refuse_checkpoint_functions

if TYPE_CHECKING:
    from torchext._dear_optimizer import DearOptimizer

__all__ = ["SteppedParameter", "stood_for"]


class SteppedParameter(nn.Parameter):
    """What is stepped of a parameter, sharing its memory; its gradient is the averaged one, waited for.

    Sharded form: this rank's slice, with one dimension. Replicated form, and plain all-reduce: the whole parameter.
    """

    held_by: DearOptimizer
    position: int  # of the parameter among the model's

    def __new__(cls, held_by: DearOptimizer, position: int, memory: torch.Tensor) -> SteppedParameter:
        """Stands for parameter number ``position``."""
        self = super().__new__(cls, memory, True)
        self.held_by, self.position = held_by, position
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """A copy would have nothing that averages its gradients: there are none.

        Raises:
            TypeError: always.
        """
        raise TypeError(NOT_COPIED)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """As copies.

        Raises:
            TypeError: always.
        """
        raise TypeError(NOT_COPIED)

    def __hash__(self) -> int:
        """As any tensor's; raises RuntimeError where set_state_dict() looks for it among the model's parameters."""
        if sys._getframe(1).f_globals.get("__name__") == CHECKPOINT_FUNCTIONS:
            refuse_checkpoint_functions()
        return id(self)

    @property
    def dropped(self) -> bool:
        """Whether its gradient was set to None since the last step."""
        return self.held_by.is_dropped(self.position)

    @property
    def grad(self) -> torch.Tensor | None:
        """The averaged gradient; None where no rank has one.

        Once that has been stepped with, the parameter's own, which has the shape of that: to be set to zero by hand.
        """
        return self.held_by.gradient(self.position, caller=sys._getframe(1).f_code)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            refuse_checkpoint_functions()
            raise RuntimeError("dear: averaged gradients are computed; change them in place")
        self.held_by.drop(self.position)


def stood_for(held: torch.Tensor) -> torch.Tensor:
    """The model's parameter that an optimizer's parameter stands for: without "dear" it is that itself."""
    return held.held_by.parameter(held) if isinstance(held, SteppedParameter) else held
