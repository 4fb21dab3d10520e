"""Numbers of NumPy's, tensors without dimensions and flags are taken where torch's embeddings take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag, ChunkPruner

IDS = torch.tensor([[1, 2, 4], [5, 4, 3]])
INTEGERS: list[Callable[[int], Any]] = [np.int64, np.int32, np.uint8, torch.tensor]
FLOATS: list[Callable[[float], Any]] = [np.float64, np.float32, np.float16, torch.tensor]
FLAGS: list[Callable[[bool], Any]] = [np.bool_, int, torch.tensor]


def trained(table: Any) -> torch.Tensor:
    with torch.no_grad():
        table.weight.copy_(torch.arange(80).view(10, 8) / 50)
    table(IDS).square().sum().backward()
    torch.optim.SGD(table.parameters(), lr=0.1).step()
    return table.weight.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize(
    ("theirs", "ours"), [(nn.Embedding, AdaptiveEmbedding), (nn.EmbeddingBag, AdaptiveEmbeddingBag)]
)
def test_integers(theirs: Any, ours: Any, kind: Callable[[int], Any]) -> None:
    sizes = (kind(10), kind(8))
    made = [cls(*sizes, padding_idx=kind(4), max_norm=kind(2), norm_type=kind(1)) for cls in (theirs, ours)]
    torch.testing.assert_close(*map(trained, made))
    assert type(made[1].num_embeddings) is type(made[1].embedding_dim) is type(made[1].padding_idx) is int


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    ("theirs", "ours"), [(nn.Embedding, AdaptiveEmbedding), (nn.EmbeddingBag, AdaptiveEmbeddingBag)]
)
def test_floats(theirs: Any, ours: Any, kind: Callable[[float], Any]) -> None:
    made = [cls(10, 8, max_norm=kind(1.5), norm_type=kind(2.0)) for cls in (theirs, ours)]
    torch.testing.assert_close(*map(trained, made))


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor])
def test_a_norm_that_is_true_is_one(kind: Callable[[bool], Any]) -> None:
    made = [cls(10, 8, max_norm=kind(True), norm_type=kind(True)) for cls in (nn.Embedding, AdaptiveEmbedding)]
    torch.testing.assert_close(*map(trained, made))


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("value", [False, True])
def test_flags(kind: Callable[[bool], Any], value: bool) -> None:
    table = AdaptiveEmbeddingBag(
        10, 8, mode="sum", sparse=kind(value), scale_grad_by_freq=kind(value), include_last_offset=kind(value)
    )
    plain = AdaptiveEmbeddingBag(10, 8, mode="sum", sparse=value, scale_grad_by_freq=value, include_last_offset=value)
    assert table.sparse is table.scale_grad_by_freq is table.include_last_offset is value
    torch.testing.assert_close(trained(table), trained(plain))
    given = AdaptiveEmbedding.from_pretrained(torch.ones(10, 8), freeze=kind(value))
    assert given.weight.requires_grad is not value


def test_numbers_of_its_own() -> None:
    table = AdaptiveEmbeddingBag(
        *(10, np.int64(8)),
        budget=np.float32(0.5),
        chunk_dim=np.int64(4),
        training="fused",
        optimizer="adam",
        lr=np.float32(0.5),
        betas=(np.float64(0.5), torch.tensor(0.75)),
        eps=np.float32(0.5),
        gamma=np.float32(0.75),
        init_std=torch.tensor(0.5),
        seed=np.int64(3),
    )
    assert (table.budget_chunks, table.chunk_dim, float(table.lr), table.betas) == (10, 4, 0.5, (0.5, 0.75))
    assert (table.eps, table.gamma, table.init_std, table.seed) == (0.5, 0.75, 0.5, 3)
    assert AdaptiveEmbeddingBag(10, 8, chunk_dim=4, budget=np.int64(6)).budget_chunks == 6
    table.prune(max_swaps=np.int64(2), hysteresis=np.float32(0.5), capacity=torch.tensor(6))
    assert table.budget_chunks == 6
    ChunkPruner(table, first=np.int64(2), growth=np.float32(2), interval=torch.tensor(8), hysteresis=np.float64(0.1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_embeddings": True}, "num_embeddings = True is a bool"),
        ({"num_embeddings": np.float32(10)}, "num_embeddings = 10.0 is a float"),
        ({"num_embeddings": torch.tensor([10])}, "num_embeddings = tensor"),
        ({"padding_idx": np.bool_(True)}, "padding_idx = True is a bool"),
        ({"max_norm": torch.ones(2)}, "max_norm = tensor"),
        ({"sparse": 1.0}, "sparse = 1.0 is a float; it must be True or False"),
        ({"scale_grad_by_freq": "no"}, "scale_grad_by_freq = 'no' is a str; it must be True or False"),
    ],
)
def test_what_is_none_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        AdaptiveEmbedding(**{"num_embeddings": 10, "embedding_dim": 8, **options})
