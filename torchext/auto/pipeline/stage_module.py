"""The layers of one stage as a module that torch's pipelines run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["StageModule"]


class _ContiguousGradient(torch.autograd.Function):
    """Hands a tensor on, and its gradient back without gaps: Gloo sends no other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class StageModule(nn.Module):
    """Runs some layers of a model, one after the other, under the names that they have in it.

    Args:
        layers: Name -> layer, in order. A name may have dots, as those of ``named_modules`` have.
        stage: Number of the stage.
        recompute: Whether only the stage's input is kept until the backward pass, and the layers run again then.
        splits_backward: Whether the gradient of the input is taken apart from those of the weights. What the stage
            gives is then no view of another tensor, for torch detaches it in place.

    Raises:
        ValueError: One layer is inside of another.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], stage: int, *, recompute: bool = False, splits_backward: bool = False
    ) -> None:
        super().__init__()
        self._stage = stage
        self._recompute, self._splits_backward = recompute, splits_backward
        self._order = tuple(layers)
        self._shape: torch.Size | None = None
        for name, layer in layers.items():
            _insert(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the layers on a micro-batch.

        Raises:
            ValueError: A micro-batch of another shape than the first.
        """
        self._check_shape(x)
        if self._stage > 0 and x.is_floating_point():
            x = _ContiguousGradient.apply(x)
        if self._recompute and torch.is_grad_enabled():
            x = checkpoint(self._run, x, use_reentrant=False)
        else:
            x = self._run(x)
        x = x.contiguous()
        return x.clone() if self._splits_backward and x._is_view() else x

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._order:
            x = self.get_submodule(name)(x)
        return x

    def _check_shape(self, x: torch.Tensor) -> None:
        if self._shape is None:
            self._shape = x.shape
        if x.shape != self._shape:
            raise ValueError(
                f"stage {self._stage} got a micro-batch of shape {tuple(x.shape)}, and before one of "
                f"{tuple(self._shape)}; torch's pipelines take equal ones: let the batch be a multiple of the number "
                "of micro-batches, and drop the last part of a batch"
            )


def _insert(root: nn.Module, name: str, layer: nn.Module) -> None:
    *parents, own = name.split(".")
    holder = root
    for parent in parents:
        if parent not in holder._modules:
            holder.add_module(parent, nn.Module())
        holder = holder.get_submodule(parent)
        if type(holder) is not nn.Module:
            raise ValueError(f"the layer {name!r} is inside of another layer; name each part of the model once")
    if own in holder._modules:
        raise ValueError(f"the layer {name!r} has others inside; name each part of the model once")
    holder.add_module(own, layer)
