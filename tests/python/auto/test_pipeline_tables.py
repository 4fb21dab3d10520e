"""Tables of pipelines: orders and lowering are those of torch, and plans, simulations and errors cross the binding."""

from __future__ import annotations

import inspect
import math
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from torchext import _C

Table = list[list[tuple[str, int, int]]]


def text(row: list[tuple[str, int, int]]) -> list[str]:
    return [f"{stage}{kind}{microbatch}" for kind, stage, microbatch in row]


def actions(table: Table) -> dict[int, list[Any]]:
    return {rank: [torchs._Action.from_str(name) for name in text(row)] for rank, row in enumerate(table)}


def random_table(draw: random.Random, stages: int, microbatches: int, *, split: bool) -> Table:
    """Any action whose needs are met comes next, micro-batches in any order."""
    table: Table = [[] for _ in range(stages)]
    done: set[tuple[str, int, int]] = set()
    back = "I" if split else "B"
    left = [(kind, j, m) for kind in ("FIW" if split else "FB") for j in range(stages) for m in range(microbatches)]
    while left:

        def ready(kind: str, j: int, m: int) -> bool:
            if kind == "F":
                return j == 0 or ("F", j - 1, m) in done
            if kind == "W":
                return ("I", j, m) in done
            return ("F", j, m) in done and (j + 1 == stages or (back, j + 1, m) in done)

        action = draw.choice([action for action in left if ready(*action)])
        left.remove(action)
        done.add(action)
        table[action[1]].append(action)
    return table


def torch_lowered(table: Table) -> list[list[str]]:
    """By `_add_send_recv`, which takes the lists apart."""
    lowered = torchs._add_send_recv(actions(table), stage_to_rank=lambda stage: stage, num_stages=len(table))
    return [[str(action) for action in lowered[rank]] for rank in range(len(table))]


def torch_runtime(table: Table, microbatches: int) -> list[list[str]]:
    """By all of `_load_csv`'s steps, without what is not computed, sent or received."""
    lowered = {}
    for rank, row in actions(table).items():
        known = inspect.signature(torchs._add_unshard_reshard).parameters
        limits = {name: 3 for name in ("max_active_stages", "unshard_lookahead") if name in known}
        row = torchs._add_unshard_reshard(row, **limits)
        lowered[rank] = torchs._add_reduce_grad(row, microbatches)
    lowered = torchs._add_send_recv(lowered, stage_to_rank=lambda stage: stage, num_stages=len(table))
    kept = re.compile(r"\d+(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B)\d+")
    return [[str(a) for a in row if kept.fullmatch(str(a))] for _, row in sorted(lowered.items())]


@pytest.mark.parametrize("seed", range(200))
def test_lowering_is_that_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 5), draw.randint(1, 6)
    table = random_table(draw, stages, microbatches, split=seed % 2 == 1)
    lowered = [text(row) for row in _C.lower_pipeline_table(table)]
    assert lowered == torch_lowered(table)
    assert lowered == torch_runtime(table, microbatches)


def computed(order: dict[int, list[Any]]) -> list[list[str]]:
    named = [[str(a) for a in row if a is not None] for _, row in sorted(order.items())]
    return [[name for name in row if re.fullmatch(r"\d+[FBIW]\d+", name)] for row in named]


def kinds(rows: list[list[str]]) -> list[str]:
    """Torch's own picture of 1F1B counts the last rank's forwards from 1."""
    return [re.sub(r"\d", "", " ".join(row)) for row in rows]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (3, 3), (4, 8), (4, 5)])
def test_orders_are_those_of_torchs_classes(stages: int, microbatches: int) -> None:
    fake = SimpleNamespace(_num_stages=stages, _n_microbatches=microbatches)
    depths = [min(microbatches, stages - stage) for stage in range(stages)]
    one = _C.pipeline_depth_table(depths, microbatches)
    assert kinds([text(row) for row in one]) == kinds(computed(torchs.Schedule1F1B._get_pipeline_order(fake)))
    gpipe = _C.pipeline_depth_table([microbatches] * stages, microbatches)
    assert [text(row) for row in gpipe] == computed(torchs.ScheduleGPipe._get_pipeline_order(fake))
    rounds = max(1, microbatches // stages)
    if microbatches % rounds == 0:
        fake.n_local_stages, fake.pp_group_size = 1, stages
        fake.microbatches_per_round = microbatches // rounds
        calculate = torchs.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
        order = {rank: calculate(fake, rank) for rank in range(stages)}
        table = _C.pipeline_zero_bubble_class_table(stages, microbatches)
        assert [text(row) for row in table] == computed(order)


def equal_layers(count: int, **more: int) -> list[_C.PipelineLayer]:
    return [
        _C.PipelineLayer(forward_seconds=1, backward_input_seconds=1, backward_weight_seconds=1, **more)
        for _ in range(count)
    ]


def test_plan_crosses_the_binding() -> None:
    link = _C.PipelineLink.straight(latency_seconds=1, bytes_per_second=math.inf)
    options = _C.PipelineOptions(
        world_size=2, stages=2, microbatches=4, memory_nbytes=15, first_input_gradient=True, frontier_points=100
    )
    plan = _C.plan_pipeline(equal_layers(8, kept_nbytes=1), link, options)
    assert plan.seconds == 61 and plan.exhaustive and plan.order == "1f1b" and plan.microbatches == 4
    assert [(s.first, s.last, s.data, s.depth, s.recompute, s.peak_nbytes) for s in plan.stages] == [
        (0, 4, 1, 3, False, 15),
        (5, 7, 1, 1, False, 3),
    ]
    assert plan.table == _C.pipeline_depth_table([3, 1], 4)
    assert [(p.memory_nbytes, p.seconds, p.sizes, p.depths) for p in plan.frontier] == [
        (4, 104, [4, 4], [1, 1]),
        (6, 71, [3, 5], [2, 1]),
        (8, 64, [4, 4], [2, 1]),
        (12, 62, [4, 4], [3, 1]),
        (15, 61, [5, 3], [3, 1]),
    ]
    assert [(a.name, a.seconds, a.reason) for a in plan.alternatives] == [
        ("2 stages, 1f1b", 61, "the plan"),
        ("2 stages, even 1f1b", 64, "4.9 % slower"),
    ]
    stages = _C.pipeline_stage_times(equal_layers(8), link, options, [5, 3])
    run = _C.simulate_pipeline(stages, plan.table, with_timeline=True)
    assert run.seconds == 61 and run.most_in_flight == [3, 1]
    assert run.bubble == pytest.approx(1 - 96 / 122)
    assert len(run.spans) == 16 and len(run.transfers) == 8
    first = run.transfers[0]
    assert (first.rank, first.kind, first.stage, first.microbatch) == (0, "SEND_F", 0, 0)
    assert (first.begin_seconds, first.end_seconds) == (5, 6)


def test_modes_and_zero_bubbles_cross_the_binding() -> None:
    stages = [
        _C.StageTimes(
            forward_seconds=2, backward_input_seconds=2, backward_weight_seconds=2, transfer_seconds=0 if last else 1
        )
        for last in (False, False, False, True)
    ]
    strict = _C.pipeline_depth_table([4, 3, 2, 1], 8)
    assert _C.simulate_pipeline(stages, strict).seconds == 82
    assert _C.simulate_pipeline(stages, strict, "class").seconds == 85
    assert 82 <= _C.simulate_pipeline(stages, strict, "torch").seconds <= 85
    table = _C.pipeline_zero_bubble_table(stages, [7] * 4, 8)
    assert _C.simulate_pipeline(stages, table).seconds < 66


def test_errors_name_the_value() -> None:
    link = _C.PipelineLink(transfer=_C.CostTable([(0, 0.0)]))
    stage = _C.StageTimes(forward_seconds=1, backward_input_seconds=1, backward_weight_seconds=1)
    blocked = [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)], _C.pipeline_depth_table([2, 2], 2)[1]]
    with pytest.raises(ValueError, match="deadlock: rank 0 waits for ever at action 1, 0B0"):
        _C.simulate_pipeline([stage, stage], blocked)
    with pytest.raises(ValueError, match=r"mode = \"exact\": allowed ideal, torch, class"):
        _C.simulate_pipeline([stage], [[("F", 0, 0), ("B", 0, 0)]], "exact")
    with pytest.raises(ValueError, match="kind"):
        _C.simulate_pipeline([stage], [[("X", 0, 0)]])
    with pytest.raises(ValueError, match="schedule"):
        _C.PipelineOptions(world_size=2, microbatches=2, schedules=["2f2b"])
    with pytest.raises(ValueError, match="stages = 3: allowed divisors of world_size, 4"):
        _C.PipelineOptions(world_size=4, microbatches=2, stages=3)
    with pytest.raises(ValueError, match="bytes_per_second = 0"):
        _C.PipelineLink.straight(latency_seconds=0, bytes_per_second=0)
    with pytest.raises(ValueError, match="limit = 0"):
        _C.pipeline_zero_bubble_table([stage], [0], 2)
    options = _C.PipelineOptions(world_size=2, stages=2, microbatches=4, memory_nbytes=3)
    with pytest.raises(ValueError, match=r"memory_bytes = 3: allowed 4 or more, with 2 stages, 1f1b; stage 0"):
        _C.plan_pipeline(equal_layers(8, kept_nbytes=1), link, options)
    bad = [_C.PipelineLayer(forward_seconds=math.nan, backward_input_seconds=1, backward_weight_seconds=1)]
    with pytest.raises(ValueError, match="forward_seconds = nan"):
        _C.plan_pipeline(bad, link, _C.PipelineOptions(world_size=1, microbatches=1))
