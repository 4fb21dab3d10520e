"""K-FAC over several ranks: every strategy is one process with the whole batch."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank, run_ranks
from kfac_net import EXACT, OPTIONS, Net, mostly_cpu, run_alone, train, use_path, whole_batch
from largest import largest
from rows import values_in_one_group, values_in_turn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torchext.optim import KFAC, PADKFAC, SPDKFAC, KFACPreconditioner

pytestmark = pytest.mark.sanitize


class Unpacking(TorchDispatchMode):
    """Looks whether triangles are unpacked by an operator, as only what runs on accelerators does."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or "unpack_triangle" in str(func)
        return func(*args, **(kwargs or {}))


def body_strategies(rank: Rank, methods: tuple[str, ...], queued: bool, shared: bool) -> dict[str, float]:
    use_path(queued)
    worst = {}
    options = OPTIONS | {"shared_memory": shared}
    for method in methods:
        steps = 6
        expected = None
        for strategy in EXACT:
            model = DistributedDataParallel(Net())
            optimizer = KFAC(model, strategy=strategy, method=method, **options)
            unpacking = Unpacking()
            with unpacking if expected is None else contextlib.nullcontext():  # it takes time
                train(model, optimizer, steps, rank=rank.rank, size=rank.size)
            assert expected is not None or unpacking.seen == queued
            assert (optimizer.stats()["shared_bytes"] > 0) == shared
            equal_everywhere(model.module)
            if expected is None:
                expected = run_alone(rank, steps, method)
            error = (flat(model.module) - expected).abs().max() / expected.abs().max()
            worst[f"{strategy} {method}"] = float(error)
    return worst


def body_split(rank: Rank, queued: bool) -> tuple[float, int]:
    """Shares of directions by columns, of every layer that can be split."""
    use_path(queued)
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="spd", split_directions=True, shared_memory=False, **OPTIONS)
    train(model, optimizer, 6, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    expected = run_alone(rank, 6, "inverse")
    assert optimizer.plan().as_dict["split_directions"]
    return float((flat(model.module) - expected).abs().max() / expected.abs().max()), optimizer.stats()["sent_bytes"]


# tests/cpp/kfac has each part's three manners.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_exact_strategy_is_one_process_with_the_whole_batch(size: int) -> None:
    cases = {
        path: (body_strategies, ("inverse", "eigen"), path == "queued", path == "memory")
        for path in ("memory", "queued", "messages")
    }
    for path, ranks in values_in_one_group(cases, size, deadline=120).items():
        for worst in ranks:
            assert largest(worst.values()) < 1e-5, (path, worst)


def body_dp(rank: Rank, queued: bool) -> float:
    use_path(queued)
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="dp", **OPTIONS)
    train(model, optimizer, 6, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    assert optimizer.stats()["all_reduce_bytes"] == 0
    assert optimizer.stats()["reduce_bytes"] == 0
    # With the same batch on all ranks, what an owner sees is what all see.
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="dp", **OPTIONS)
    train(model, optimizer, 6)
    expected = run_alone(rank, 6, "inverse")
    return float((flat(model.module) - expected).abs().max())


def triangle(dim: int) -> int:
    return dim * (dim + 1) // 2


# (A, G) of Net's layers; two groups of the grouped convolution; a diagonal A of the embedding.
ELEMENTS = [
    (triangle(10), triangle(4)),
    (2 * triangle(19), 2 * triangle(2)),
    (7, triangle(6)),
    (triangle(23), triangle(9)),
    (triangle(9), triangle(3)),
]
FACTOR_BYTES = 8 * sum(a + g for a, g in ELEMENTS)
# From each of four ranks to each other, in a step that sends: a number for the step, and how many rows each layer had.
VERDICTS = 4 * 3 * 8 * (1 + len(ELEMENTS))


def body_bytes(rank: Rank, queued: bool) -> dict[str, dict[str, Any]]:
    use_path(queued)
    rank.init("gloo")
    found = {}
    for strategy in ("spd", "pad", "comm-opt", "mem-opt", "hybrid", "d-kfac"):
        model = DistributedDataParallel(Net())
        optimizer = KFAC(model, strategy=strategy, split_directions=False, shared_memory=False, **OPTIONS)
        before = optimizer.stats()
        train(model, optimizer, 6, rank=rank.rank, size=rank.size)  # two updates of the inverses
        after = optimizer.stats()
        found[strategy] = {name: after[name] - before[name] for name in after if name.endswith("_bytes")}
        found[strategy]["placed"] = [f["owner"] >= 0 for f in optimizer.plan().as_dict["factors"]]
    return found


@mostly_cpu
def test_only_triangles_travel_and_only_when_inverses_are_made(queued: bool) -> None:
    outcomes = run_ranks(body_bytes, 4, queued)
    gradient = 8 * (4 * 10 + 4 * 19 + 7 * 6 + 9 * 23 + 3 * 9)
    for found in outcomes:
        for strategy in ("comm-opt", "mem-opt", "hybrid", "d-kfac", "spd"):
            assert found[strategy]["all_reduce_bytes"] == 2 * FACTOR_BYTES, strategy
            assert found[strategy]["broadcast_bytes"] == 0, strategy
        assert found["pad"]["reduce_bytes"] == 2 * FACTOR_BYTES
    sent = {name: sum(found[name]["sent_bytes"] for found in outcomes) - 2 * VERDICTS for name in outcomes[0]}
    assert sent["comm-opt"] == 3 * 2 * FACTOR_BYTES  # inverses, to the three others
    assert sent["mem-opt"] == 3 * 6 * gradient
    assert sent["hybrid"] == 2 * FACTOR_BYTES + 2 * 6 * gradient  # one more worker; two that are none
    assert sent["d-kfac"] == 0


def body_overlap(rank: Rank, queued: bool) -> tuple[int, int]:
    use_path(queued)
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = SPDKFAC(model, lr=0.1, damping=0.01, inverse_update_steps=1, shared_memory=False)
    train(model, optimizer, 10, rank=rank.rank, size=rank.size)
    stats = optimizer.stats()
    return stats["runs"], stats["runs_overlapped"]


def body_no_sync(rank: Rank, queued: bool) -> float:
    use_path(queued)
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = PADKFAC(model, **OPTIONS)
    for step in range(6):
        optimizer.zero_grad()
        image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(step))
        with model.no_sync():
            (nn.functional.cross_entropy(model(image[:2], token[:2]), target[:2]) / 2).backward()
        (nn.functional.cross_entropy(model(image[2:], token[2:]), target[2:]) / 2).backward()
        optimizer.step()
    expected = run_alone(rank, 6, "inverse")
    return float((flat(model.module) - expected).abs().max() / expected.abs().max())


@mostly_cpu
def test_other_ways_are_one_process_with_the_whole_batch(queued: bool) -> None:
    size = 3
    cases = {
        "directions split by columns": (body_split, queued),
        "the owners' own factors": (body_dp, queued),
        "accumulation under no_sync": (body_no_sync, queued),
    }
    found = values_in_turn(cases, size)
    assert all(error < 1e-9 for error, _ in found["directions split by columns"])
    # Linear and ungrouped convolutions, in each step, to all other ranks.
    sent = sum(sent for _, sent in found["directions split by columns"])
    assert sent >= (size - 1) * 6 * 8 * (4 * 10 + 9 * 23 + 3 * 9)
    assert largest(found["the owners' own factors"]) < 1e-9
    assert largest(found["accumulation under no_sync"]) < 1e-5


def body_more_calls(rank: Rank, queued: bool, changes: str) -> float:
    """Factors have left, and then there is more of them, or the loss turns out to be scaled: all are sent again."""
    use_path(queued)
    rank.init("gloo", timeout=20)
    groups = [dist.new_group([r]) for r in range(rank.size)]
    flats = []
    for alone in (False, True):
        model = Net() if alone else DistributedDataParallel(Net())
        mine, size = (0, 1) if alone else (rank.rank, rank.size)
        group = groups[rank.rank] if alone else None
        options = {"damping": 0.01, "inverse_update_steps": 1, "shared_memory": False}
        optimizer = SPDKFAC(model, lr=0.1, process_group=group, **options)
        runs = []
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_factor=1024.0, growth_interval=5)
        for step in range(10):
            before = optimizer.stats()["runs"]
            optimizer.zero_grad()
            parts = 3 if changes == "calls" and step == 6 else 1
            for part in range(parts):
                image, token, target = (p.chunk(size)[mine] for p in whole_batch(step + 100 * part))
                loss = nn.functional.cross_entropy(model(image, token), target) / parts
                (scaler.scale(loss) if changes == "scale" else loss).backward()
            if changes == "scale":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            runs.append(optimizer.stats()["runs"] - before)
        again = {"calls": 6, "scale": 5}[changes]
        assert alone or runs == [runs[0] * (2 if step == again else 1) for step in range(10)], runs
        flats.append(flat(model if alone else model.module))  # type: ignore[arg-type]
    return float((flats[0] - flats[1]).abs().max() / flats[1].abs().max())


@mostly_cpu
def test_runs_leave_during_the_backward_pass_and_again_if_it_was_too_early(queued: bool) -> None:
    cases = {
        "during": (body_overlap, queued),
        "more calls": (body_more_calls, queued, "calls"),
        "another scale": (body_more_calls, queued, "scale"),
    }
    found = values_in_turn(cases, 2)
    for runs, overlapped in found["during"]:  # from the third step on: two show how often a layer is called
        assert 0 < overlapped < runs
        assert overlapped >= 0.7 * runs
    assert largest(found["more calls"]) < 1e-9
    assert largest(found["another scale"]) < 1e-9


def body_preconditioner(rank: Rank) -> float:
    rank.init("gloo")
    flats = []
    for _ in range(2):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # Not "pad", where measured costs choose the products that a direction is made of, and so its rounding.
        KFACPreconditioner(model, optimizer, strategy="mem-opt", inverse_update_steps=2)
        train(model, optimizer, 4, rank=rank.rank, size=rank.size)
        equal_everywhere(model.module)
        flats.append(flat(model.module))
    return float((flats[0] - flats[1]).abs().max())


def test_in_front_of_another_optimizer() -> None:
    assert max(run_ranks(body_preconditioner, 2)) == 0


def body_two_groups(rank: Rank) -> float:
    """Two disjoint groups of equal size, each its own data and model; and a subgroup while others do nothing."""
    rank.init("gloo")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank.rank // 2]
    model = DistributedDataParallel(Net(), process_group=mine)
    optimizer = SPDKFAC(model, **OPTIONS)
    for step in range(6):
        image, token, target = (p.chunk(2)[rank.rank % 2] for p in whole_batch(step + 100 * (rank.rank // 2)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, token), target).backward()
        optimizer.step()
    other = [torch.empty_like(flat(model.module)) for _ in range(2)]
    dist.all_gather(other, flat(model.module), group=mine)
    assert torch.equal(other[0], other[1])
    return float(flat(model.module).sum())


def test_two_groups_of_equal_size_do_not_mix() -> None:
    sums = run_ranks(body_two_groups, 4)
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    assert not math.isclose(sums[0], sums[2], rel_tol=1e-9)
