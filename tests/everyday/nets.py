"""The model that random scripts train: small, with parts to call alone, weights to share and outputs of many kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Box:
    out: torch.Tensor


class Holder:
    """DDP does not look into it."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out


# Output -> how a script takes the tensor out of it.
OUTPUTS = {
    "tensor": "{}",
    "tuple": "{}[0]",
    "dict": '{}["out"]',
    "dataclass": "{}.out",
    "distribution": "{}.mean",
    "object": "{}.out",
    "closure": "{}()",
}


def wrapped(out: torch.Tensor, output: str) -> Any:
    if output == "tuple":
        return out, None
    if output == "dict":
        return {"out": out}
    if output == "dataclass":
        return Box(out)
    if output == "distribution":
        return torch.distributions.Normal(out, 1.0)
    if output == "object":
        return Holder(out)
    if output == "closure":
        return lambda: out
    return out


class Net(nn.Module):
    def __init__(
        self,
        output: str = "tensor",
        norm: str = "none",
        tied: bool = False,
        checkpointed: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.norm = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm](16)
        self.body, self.more = nn.Linear(16, 16), nn.Linear(16, 16)
        if tied:
            self.more.weight = self.body.weight
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 2)
        self.output, self.checkpointed = output, checkpointed
        self.which = "ab"  # the branches that a pass takes
        self.fail = False

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        if "a" in self.which:
            h = torch.tanh(self.body(h))
        if "b" in self.which:
            h = torch.tanh(self.more(h))
        return h

    def forward(self, x: torch.Tensor, embedded: bool = False) -> Any:
        h = self.norm(x if embedded else torch.tanh(self.embed(x)))
        h = checkpoint(self.inner, h, use_reentrant=False) if self.checkpointed else self.inner(h)
        if self.fail:
            raise ValueError("a bad batch")
        return wrapped(self.head(self.dropout(h)), self.output)


def flat(tensors: Any) -> torch.Tensor:
    """The values of a module's parameters, or of tensors, as one."""
    if isinstance(tensors, nn.Module):
        tensors = tensors.parameters()
    parts = [t.detach().double().reshape(-1).clone() for t in tensors if t is not None]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.double)
