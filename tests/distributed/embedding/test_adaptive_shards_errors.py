"""What one rank of shards gets wrong is an error on all, and nobody is left behind in another collective."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adaptive import DIM, ROWS
from harness import Rank, run_ranks
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
    rank.init("gloo")
    layer = AdaptiveEmbedding(ROWS, DIM, training="sharded", optimizer="adam", lr=0.1, chunk_dim=4, **options)
    before = seasoned(rank, layer)
    try:
        layer(torch.tensor([1, 2, ROWS if rank.rank == 1 else 3]))
    except (IndexError, ValueError) as error:
        check_unchanged(layer, before)
        # and nobody is left behind in another collective
        return type(error).__name__, f"{error} {layer(torch.tensor([[rank.rank]])).shape}"
    return "", "no error"


@pytest.mark.parametrize("options", BUDGETS, ids=lambda options: options.get("layout", "whole"))
def test_a_bad_batch_of_one_rank_is_an_error_on_all(options: dict[str, Any]) -> None:
    first, second = run_ranks(sharded_badly, 2, options)
    assert first[0] == "ValueError"
    assert "rank 1 was given a batch" in first[1]
    assert second[0] == "IndexError"
    assert "id 37 at position 2 is out of range; the table has rows 0..36" in second[1]
    assert "torch.Size([1, 1, 8])" in first[1]


def badly_called(rank: Rank, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str) -> tuple[str, str]:
    """On rank 1, what never comes to a look-up."""
    rank.init("gloo", timeout=20)
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


@pytest.mark.parametrize(
    ("ids", "offsets", "weights", "mode", "kind", "text"),
    [
        (torch.zeros(2), None, None, "sum", "TypeError", "input is torch.float32; it must be int32"),
        *(
            (
                torch.zeros(1, 2, dtype=kind),
                None,
                None,
                "sum",
                "TypeError",
                f"input is {kind}; it must be int32 or int64",
            )
            for kind in (torch.bool, torch.int16, torch.complex64)
        ),
        (torch.tensor([1]), torch.tensor([0.0]), None, "sum", "TypeError", "offsets is torch.float32; it must be int"),
        (torch.tensor([1, 2]), torch.tensor([1]), None, "sum", "ValueError", "offsets[0] is 1, but the first bag must"),
        (torch.tensor([1, 2]), torch.tensor([0, 3]), None, "mean", "ValueError", "offsets[1] is 3, past the end of 2"),
        (
            torch.tensor([[1, -1]]),
            None,
            None,
            "mean",
            "IndexError",
            "id -1 at position 1 is out of range; the table has",
        ),
        (torch.tensor([1]), None, None, "sum", "ValueError", "offsets must be given with a 1-D input"),
        (torch.tensor([[1]]), torch.tensor([0]), None, "sum", "ValueError", "offsets must be None with a 2-D input"),
        (torch.tensor([1]), torch.tensor([[0]]), None, "sum", "ValueError", "offsets has shape (1, 1); it must be 1-D"),
        (
            torch.tensor([[1]]),
            None,
            torch.ones(2),
            "sum",
            "ValueError",
            "per_sample_weights has shape (2,), input (1, 1)",
        ),
        (
            torch.tensor([[1]]),
            None,
            torch.ones(1, 1).double(),
            "sum",
            "TypeError",
            "per_sample_weights is torch.float64",
        ),
        (torch.tensor([[1]]), None, torch.ones(1, 1), "mean", "NotImplementedError", "per_sample_weights need mode"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str, kind: str, text: str
) -> None:
    first, second = run_ranks(badly_called, 2, ids, offsets, weights, mode)
    assert first[0] == "ValueError" and "rank 1 was given a batch" in first[1], first
    assert second[0] == kind and text in second[1], second
    assert "torch.Size([1, 8])" in first[1] and "torch.Size([1, 8])" in second[1]


def budgets_of_shards(rank: Rank, rows: int, budget: int) -> int | str:
    rank.init("gloo")
    try:
        return AdaptiveEmbeddingBag(rows, DIM, budget=budget, chunk_dim=4, training="sharded").budget_chunks
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("rows", "budget", "expected"),
    [
        (ROWS, 2 * ROWS, [38, 36]),
        (ROWS, 20, [10, 9]),
        (ROWS, 1, [1, 1]),
        (1, 2, [2, 0]),  # rank 1 has no row
        (ROWS, 2 * ROWS + 1, ["budget = 75: allowed 1..74 chunks, or a share as a float"] * 2),
        (ROWS, 0, ["budget = 0: allowed 1..74 chunks, or a share as a float"] * 2),
    ],
)
def test_a_number_of_chunks_is_shared_out_by_rows(rows: int, budget: int, expected: list[int | str]) -> None:
    assert run_ranks(budgets_of_shards, 2, rows, budget) == expected


def weight_of_shards(rank: Rank) -> list[str]:
    rank.init("gloo")
    table = AdaptiveEmbedding(ROWS, DIM, training="sharded")
    with torch.no_grad():
        table.weight.fill_(rank.rank + 1.0)  # its own rows
    assert table(torch.tensor([0, 1]))[:, 0].tolist() == [1.0, 2.0]
    found = []
    for action in (
        lambda: table.weight.requires_grad_(False),
        lambda: torch.optim.SGD([table.weight], lr=0.1),
        lambda: torch.nn.functional.linear(table(torch.tensor([1])), table.weight),
        lambda: setattr(table, "weight", torch.nn.Parameter(torch.ones(ROWS, DIM))),
    ):
        try:
            action()
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_the_weight_of_shards_may_be_written_and_not_trained() -> None:
    for frozen, given, tied, replaced in run_ranks(weight_of_shards, 2):
        assert frozen.startswith("weight of this table is frozen, thawed or made a parameter")
        assert given.startswith("weight of this table is given to an optimizer")
        assert tied.startswith("weight of this table is asked for a gradient")
        assert replaced.startswith("weight of this table is replaced by a parameter")
        for text in (frozen, given, tied, replaced):
            assert text.endswith(
                "take training = 'dense' or 'sparse' with budget = 1.0, of which weight is a parameter"
            )
