"""Placements say what cannot be, and tables of depths are those of 1F1B and GPipe."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pipeline_examples import random_table

from torchext.auto import json_file
from torchext.auto.pipeline import Placement, Stage, torch_runtime
from torchext.auto.pipeline.placement import warm_up_rows


def test_depths_give_the_orders_of_the_field() -> None:
    assert warm_up_rows([2, 1], 3) == (
        ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2"),
        ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2"),
    )
    assert warm_up_rows([9], 2) == (("0F0", "0F1", "0B0", "0B1"),)
    strict = Placement.by_depth([1, 1, 1], [3, 2, 1], 4)
    assert torch_runtime.public_class(strict) == "Schedule1F1B"
    assert torch_runtime.public_class(Placement.by_depth([1, 1, 1], [4, 4, 4], 4)) == "ScheduleGPipe"
    assert torch_runtime.public_class(Placement.by_depth([1, 1, 1], [4, 2, 1], 4)) is None
    assert torch_runtime.public_class(Placement.by_depth([1, 1, 1], [2, 2, 1], 2)) is None  # M < p: the class refuses


def test_the_public_orders_are_those_of_torch() -> None:
    from torch.distributed.pipelining import Schedule1F1B

    class Order(Schedule1F1B):
        def __init__(self, stages: int, microbatches: int) -> None:
            self._num_stages, self._n_microbatches = stages, microbatches

    found = Order(3, 5)._get_pipeline_order()
    assert found is not None
    rows = [[str(one) for one in found[rank] if one is not None and one.microbatch_index is not None] for rank in found]
    # Of the last rank that list counts forwards from 1 on; what the class runs begins with 0.
    assert rows[:-1] == [list(row) for row in warm_up_rows([3, 2, 1], 5)][:-1]


def test_what_a_placement_knows() -> None:
    stages = (Stage(0, 2, data=2, tensor=2, depth=2), Stage(3, 3, data=2, tensor=2))
    placement = Placement(stages, 2, "1f1b", warm_up_rows([2, 1], 2))
    assert (placement.layers, placement.world_size, placement.data, placement.splits_backward) == (4, 8, 2, False)
    assert placement.csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    again = json_file.loads(Placement, json_file.dumps(placement))
    assert again == placement
    assert again.fingerprint() == placement.fingerprint()
    other = Placement(stages, 2, "1f1b", warm_up_rows([2, 2], 2))
    assert other.fingerprint() != placement.fingerprint()


def test_any_table_that_can_go_on_is_taken() -> None:
    for seed in range(50):
        rows, microbatches = random_table(random.Random(seed))
        stages = tuple(Stage(number, number) for number in range(len(rows)))
        assert Placement(stages, microbatches, "zero-bubble", rows).table == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": 0}, "microbatches must be 1 or more, got 0"),
        ({"order": "interleaved"}, "order must be one of 1f1b, gpipe, zero-bubble, got 'interleaved'"),
        ({"stages": (Stage(0, 1), Stage(3, 3))}, "stage 1 must begin with layer 2, got 3"),
        ({"stages": (Stage(0, 1),)}, "table must have a row for each stage, got 2 rows and 1 stages"),
        ({"table": (("0F0", "0B0"), ("1F0", "1B0"))}, "rank 0 does not take micro-batch 1 forward and backward"),
        ({"table": (("0F0", "0B0", "1F1"), ())}, "rank 0 has the action '1F1', which is not of its stage"),
        ({"table": (("0B0",), ())}, "rank 0 has the action '0B0' after nothing of that micro-batch"),
        ({"table": (("0F0", "0X0"), ())}, "an action must be stage, one of F, B, I, W, and micro-batch"),
        ({"table": warm_up_rows([1, 2], 2)}, "the table cannot go on: rank 0 waits before '0B0' for ever"),
    ],
)
def test_bad_placements(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "stages": (Stage(0, 1), Stage(2, 2)),
        "microbatches": 2,
        "order": "1f1b",
        "table": warm_up_rows([2, 1], 2),
    }
    Placement(**good)
    with pytest.raises(ValueError, match=message):
        Placement(**(good | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first": 2, "last": 1}, "a stage must have a layer or more, got first=2 and last=1"),
        ({"first": 0, "last": 1, "data": 0}, "data of a stage must be 1 or more, got 0"),
        ({"first": 0, "last": 1, "depth": 0}, "depth of a stage must be 1 or more, got 0"),
    ],
)
def test_bad_stages(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stage(**arguments)
