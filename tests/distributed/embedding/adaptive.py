"""The table, the batches and the loss of the tests of adaptive embeddings on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from torchext.nn import AdaptiveEmbeddingBag

ROWS, DIM, BAGS, STEPS = 37, 8, 6, 12


def batch(rank: int, step: int, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.rand(BAGS, size, generator=generator) ** 2 * ROWS).long()


def loss(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def hold(table: AdaptiveEmbeddingBag, keys: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Prunes a table of the direct layout so that just these chunks are resident."""
    table.utility.zero_()
    table.utility[keys] = 1
    table.prune(optimizer=optimizer, capacity=len(keys))
