"""What one rank of shards gets wrong is an error on all, and nobody is left behind in another collective."""

from __future__ import annotations

import copy
from typing import Any

import torch
from adaptive import DIM, ROWS
from harness import Rank
from rows import row, values_in_one_group
from torch import Tensor

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag


def seasoned(rank: Rank, table: AdaptiveEmbedding | AdaptiveEmbeddingBag) -> dict[str, Tensor]:
    """Trains and prunes a table, so that all its tensors have something in them; what they are then."""
    for _ in range(2):
        table(torch.arange(rank.rank, rank.rank + 12).view(4, 3)).sub(1).square().sum().backward()
        table.prune()
    assert all(value.any() for value in table.state_dict().values() if value.numel())
    return copy.deepcopy(table.state_dict())


def check_unchanged(table: AdaptiveEmbedding | AdaptiveEmbeddingBag, before: dict[str, Tensor]) -> None:
    for name, value in table.state_dict().items():
        assert torch.equal(value, before[name]), name


BUDGETS: list[dict[str, Any]] = [{}, *({"budget": 0.5, "layout": layout} for layout in ("direct", "hash", "sketch"))]


def sharded_badly(rank: Rank, options: dict[str, Any]) -> tuple[str, str]:
    layer = AdaptiveEmbedding(ROWS, DIM, training="sharded", optimizer="adam", lr=0.1, chunk_dim=4, **options)
    before = seasoned(rank, layer)
    try:
        layer(torch.tensor([1, 2, ROWS if rank.rank == 1 else 3]))
    except (IndexError, ValueError) as error:
        check_unchanged(layer, before)
        # and nobody is left behind in another collective
        return type(error).__name__, f"{error} {layer(torch.tensor([[rank.rank]])).shape}"
    return "", "no error"


def test_a_bad_batch_of_one_rank_is_an_error_on_all() -> None:
    cases = {options.get("layout", "whole"): (sharded_badly, options) for options in BUDGETS}
    for name, (first, second) in values_in_one_group(cases, 2, timeout=20).items():
        with row(name):
            assert first[0] == "ValueError"
            assert "rank 1 was given a batch" in first[1]
            assert second[0] == "IndexError"
            assert "id 37 at position 2 is out of range; the table has rows 0..36" in second[1]
            assert "torch.Size([1, 1, 8])" in first[1]


def badly_called(rank: Rank, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str) -> tuple[str, str]:
    """On rank 1, what never comes to a look-up."""
    bag = AdaptiveEmbeddingBag(ROWS, DIM, mode=mode, training="sharded", budget=0.5, chunk_dim=4)
    before = seasoned(rank, bag)
    good = torch.tensor([[1, 2]])
    try:
        if rank.rank == 1:
            bag(ids, offsets, weights)
        else:
            bag(good)
    except (IndexError, TypeError, ValueError, NotImplementedError) as error:
        check_unchanged(bag, before)
        return type(error).__name__, f"{error} {bag(good).shape}"
    return "", "no error"


def long(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# ids, offsets, weights, mode; and the error.
WRONG: list[tuple[tuple[Tensor, Tensor | None, Tensor | None, str], str, str]] = [
    ((torch.zeros(2), None, None, "sum"), "TypeError", "input is torch.float32; it must be int32"),
    *(
        ((torch.zeros(1, 2, dtype=kind), None, None, "sum"), "TypeError", f"input is {kind}; it must be int32 or int64")
        for kind in (torch.bool, torch.int16, torch.complex64)
    ),
    ((long([1]), torch.zeros(1), None, "sum"), "TypeError", "offsets is torch.float32; it must be int"),
    ((long([1, 2]), long([1]), None, "sum"), "ValueError", "offsets[0] is 1, but the first bag must"),
    ((long([1, 2]), long([0, 3]), None, "mean"), "ValueError", "offsets[1] is 3, past the end of 2"),
    ((long([[1, -1]]), None, None, "mean"), "IndexError", "id -1 at position 1 is out of range; the table has"),
    ((long([1]), None, None, "sum"), "ValueError", "offsets must be given with a 1-D input"),
    ((long([[1]]), long([0]), None, "sum"), "ValueError", "offsets must be None with a 2-D input"),
    ((long([1]), long([[0]]), None, "sum"), "ValueError", "offsets has shape (1, 1); it must be 1-D"),
    ((long([[1]]), None, torch.ones(2), "sum"), "ValueError", "per_sample_weights has shape (2,), input (1, 1)"),
    ((long([[1]]), None, torch.ones(1, 1).double(), "sum"), "TypeError", "per_sample_weights is torch.float64"),
    ((long([[1]]), None, torch.ones(1, 1), "mean"), "NotImplementedError", "per_sample_weights need mode"),
]


def test_a_wrong_argument_on_one_rank_is_an_error_on_all() -> None:
    cases = {text: (badly_called, *given) for given, _, text in WRONG}
    kinds = {text: kind for _, kind, text in WRONG}
    for text, (first, second) in values_in_one_group(cases, 2, timeout=20).items():
        with row(text):
            assert first[0] == "ValueError" and "rank 1 was given a batch" in first[1], first
            assert second[0] == kinds[text] and text in second[1], second
            assert "torch.Size([1, 8])" in first[1] and "torch.Size([1, 8])" in second[1]
