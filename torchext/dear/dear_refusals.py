"""Refusals of "dear" name the optimizers that it does not take, kinds and copies, and say why."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["ELEMENTWISE", "ONE_BY_ONE", "check_stepped", "refuse_copies"]

# Each element of a parameter is stepped by itself: a slice is stepped as the whole would be.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
    torch.optim.Rprop,
)
# Each parameter is stepped by itself, when the optimizer is asked to, with what its state and its group say.
ONE_BY_ONE = (
    *ELEMENTWISE,
    *(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)),
)
_NOT_COPIED = (
    "dear: an attached optimizer cannot be copied or pickled, its parameters are stepped for a model and a group of "
    "ranks; take optimizer.state_dict() (on all ranks, in the sharded form it is collective) and load it into a new "
    "optimizer of the copied model, or call detach() of what torchext.attach returned first"
)


def check_stepped(optimizer: torch.optim.Optimizer, form: str) -> None:
    """Raises TypeError for an optimizer that a form of "dear" cannot step."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("torchext.attach: LBFGS steps several times inside one call, with its closure; DeAR needs one")
    if form == "replicated" or kind in ELEMENTWISE or getattr(kind, "elementwise", False):
        return
    raise TypeError(
        f"torchext.attach: {kind.__name__} is not known to step every element of a parameter by itself, as DeAR's "
        "sharded form needs; use DeAROptions(form='replicated'), or, if it does, set the class attribute "
        f"{kind.__name__}.elementwise = True"
    )


def refuse_copies(*_: Any) -> NoReturn:
    """Raises TypeError.

    Raises:
        TypeError: always.
    """
    raise TypeError(_NOT_COPIED)
