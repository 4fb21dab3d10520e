"""An autograd anchor requires a gradient in place of a table that is updated in its backward pass."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["drop_gradients"]


def _drop(anchor: Tensor) -> None:
    anchor.grad = None


def drop_gradients(anchor: nn.Parameter) -> None:
    """Leaves none on an anchor after a backward pass: an empty one has no largest value for clip_grad_norm_.

    A copy of the anchor needs it anew.
    """
    trains = anchor.requires_grad  # only then it takes hooks, and keeps them
    anchor.requires_grad_().register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    anchor.requires_grad_(trains)
