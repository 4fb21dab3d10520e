"""What "dear" refuses of optimizers, with the words for it: kinds, copies, and functions that look into them."""

from __future__ import annotations

import sys
import types

import torch

__all__ = [
    "CHECKPOINT_FUNCTIONS",
    "ELEMENTWISE",
    "NOT_AVERAGED",
    "NOT_COPIED",
    "check_stepped",
    "refuse_checkpoint_functions",
]

# Each element of a parameter is stepped by itself: a slice is stepped as the whole would be.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
    torch.optim.Rprop,
)
# The module of get_state_dict() and set_state_dict().
CHECKPOINT_FUNCTIONS = "torch.distributed.checkpoint.state_dict"
NOT_AVERAGED = (
    "dear: optimizer.step() has no averaged gradients: those that the parameters have were stepped with before or set "
    "to zero, or come from backward passes inside no_sync() or of a forward pass beside DistributedDataParallel's; "
    "call optimizer.zero_grad() after each step, and have the last forward and backward pass before a step outside "
    "no_sync(), through the wrapped model"
)
NOT_COPIED = (
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


def refuse_checkpoint_functions() -> None:
    """Raises RuntimeError if get_state_dict or one of its kind asks; they look for the model's own parameters."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == CHECKPOINT_FUNCTIONS:
            raise RuntimeError(
                "dear: torch.distributed.checkpoint's get_state_dict() and set_state_dict() do not find the model's "
                "parameters in an attached optimizer; save sync.optimizer_state_dict(), load it with "
                "sync.load_optimizer_state_dict(), and take the model's state by get_model_state_dict()"
            )
        frame = frame.f_back
