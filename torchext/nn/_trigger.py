"""What requires a gradient in place of a table that is updated in its backward pass."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["drop_gradients"]


def _drop(trigger: Tensor) -> None:
    trigger.grad = None


def drop_gradients(trigger: nn.Parameter) -> None:
    """Leaves none on a trigger after a backward pass: an empty one has no largest value for clip_grad_norm_.

    A copy of the trigger needs it anew.
    """
    trains = trigger.requires_grad  # only then it takes hooks, and keeps them
    trigger.requires_grad_().register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    trigger.requires_grad_(trains)
