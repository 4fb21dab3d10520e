"""Directions made of the rows of all ranks' batches: every strategy is one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attached import equal_everywhere, flat
from dense_net import ROW_OPTIONS, STEPS, Dense, batch, check_plan
from harness import Rank, run_ranks
from kfac_net import OPTIONS, ROWS, Net, run_alone, train
from largest import largest
from rows import row, values_in_one_group
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC, KFACPreconditioner

STRATEGIES = ("spd", "pad", "comm-opt", "hybrid", "auto")


def body(rank: Rank, shared: bool, options: dict[str, Any]) -> dict[str, tuple[float, int]]:
    expected = run_alone(rank, STEPS, "inverse", **options)
    start = flat(Net())
    found = {}
    for strategy in STRATEGIES:
        model = DistributedDataParallel(Net())
        optimizer = KFAC(
            model,
            strategy=strategy,
            shared_memory=shared,
            gather_rows=True,
            **(OPTIONS | options),
        )
        check_plan(optimizer, split=options.get("split_directions", False), shared=shared)
        train(model, optimizer, STEPS, rank=rank.rank, size=rank.size)
        equal_everywhere(model.module)
        error = (flat(model.module) - expected).abs().max() / (expected - start).abs().max()
        stats = optimizer.stats()
        assert stats["row_directions_refused"] == 0
        assert (stats["shared_bytes"] > 0) == (shared and rank.size > 1)
        # Two Linear layers in five steps; under `hybrid` and what `auto` may choose some belong to few ranks.
        whose = {f["layer"]: f["workers"] for f in optimizer.plan().as_dict["factors"]}
        assert stats["row_directions"] == 5 * [whose["hidden"], whose["head"]].count(rank.size)
        found[strategy] = (float(error), stats["row_directions"])
    return found


WAYS: dict[str, dict[str, Any]] = {
    "factors in all steps": {},
    "in every third": {"factor_update_steps": 3},
    "split": {"split_directions": True},
}


def check_exact(found: dict[str, tuple[float, int]], size: int) -> None:
    for strategy, (error, count) in found.items():
        assert error < 1e-9, found
        assert count == 10 or (strategy in ("hybrid", "auto") and size > 1), found


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4)), 3])
def test_every_strategy_is_one_process_with_the_whole_batch(size: int) -> None:
    ways = [(shared, way) for way in WAYS for shared in (False, True)]
    cases = {f"{way}, memory {shared}": (body, shared, WAYS[way]) for shared, way in ways}
    for name, ranks in values_in_one_group(cases, size).items():
        with row(name):
            for found in ranks:
                check_exact(found, size)


def body_bytes(rank: Rank, split: bool) -> list[int]:
    model = DistributedDataParallel(Dense())
    optimizer = KFAC(model, gather_rows=True, **(ROW_OPTIONS | {"split_directions": split}))
    check_plan(optimizer, split=split, shared=False)
    sent = []
    for step in range(STEPS):
        before = optimizer.stats()["sent_bytes"]
        optimizer.zero_grad()
        model(batch(step).chunk(rank.size)[rank.rank]).square().mean().backward()
        optimizer.step()
        sent.append(optimizer.stats()["sent_bytes"] - before)
    return [sent[step] for step in (4, 5, 7)]


def test_rows_are_all_that_travels_between_updates() -> None:
    # To each other rank: the step, three counts, and four rows of each layer's inputs and outputs.
    elements = 4 + ROWS // 3 * (10 + 40 + 40 + 40 + 40 + 3)
    found = values_in_one_group({f"split {split}": (body_bytes, split) for split in (False, True)}, 3)
    assert found == {name: [[2 * 8 * elements] * 3] * 3 for name in ("split False", "split True")}


def body_uneven(rank: Rank, shared: bool, split: bool) -> tuple[float, dict[str, Any]]:
    """Batches of other sizes on every rank, in every step; the last rank leaves a layer out in some."""
    models = [DistributedDataParallel(Dense(), find_unused_parameters=True) for _ in range(2)]
    optimizers = [
        KFAC(model, gather_rows=rows, **(ROW_OPTIONS | {"shared_memory": shared, "split_directions": split}))
        for model, rows in zip(models, (False, True), strict=True)
    ]
    for optimizer in optimizers:
        check_plan(optimizer, split=split, shared=shared)
    for step in range(STEPS):
        rows = (9, 5, 2)[rank.rank] - (2 if rank.rank == 0 and step % 3 == 2 else 0) + (3 if step == 7 else 0)
        mine = batch(10 * step + rank.rank, rows)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(mine, seldom=rank.rank < 2 or step % 2 == 0).square().mean().backward()
            optimizer.step()
    for model in models:
        equal_everywhere(model.module)
    whole, of_rows = (flat(model.module) for model in models)
    return float((whole - of_rows).abs().max() / (whole - flat(Dense())).abs().max()), optimizers[1].stats()


def test_ranks_whose_batches_differ() -> None:
    ways = [(shared, split) for shared in (False, True) for split in (False, True)]
    cases = {f"memory {shared}, split {split}": (body_uneven, shared, split) for shared, split in ways}
    for name, values in values_in_one_group(cases, 3).items():
        for error, stats in values:
            assert error < 1e-9, name
            # In step 7 the first rank has more rows than places.
            assert (stats["row_directions"], stats["row_directions_refused"]) == (3 * 4, 3), name


def body_no_sync(rank: Rank) -> float:
    """Gradients are accumulated without averaging, then averaged; under a scaler."""
    rank.init("gloo")
    found = []
    for rows in (False, True):
        model = DistributedDataParallel(Dense(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kfac = KFACPreconditioner(
            model,
            optimizer,
            strategy="pad",
            gather_rows=rows,
            damping=0.01,
            inverse_update_steps=3,
            shared_memory=False,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = batch(step).float().chunk(rank.size)[rank.rank].chunk(2)
            with model.no_sync():
                scaler.scale(model(parts[0]).square().mean() / 2).backward()
            scaler.scale(model(parts[1]).square().mean() / 2).backward()
            scaler.step(optimizer)
            scaler.update()
        equal_everywhere(model.module)
        found.append(flat(model.module))
        assert (kfac.stats()["row_directions"] > 0) == rows
    return float((found[0] - found[1]).abs().max() / (found[0] - flat(Dense(torch.float32))).abs().max())


def test_accumulation_without_averaging_and_a_scaler() -> None:
    assert largest(run_ranks(body_no_sync, 2)) < 1e-4


def body_penalty(rank: Rank, count: int, options: dict[str, Any]) -> tuple[int, int]:
    """One rank's loss has a penalty; every rank takes that layer's mean gradient whole."""
    models = [DistributedDataParallel(Dense()) for _ in range(2)]
    optimizers = [
        KFAC(m, gather_rows=rows, **(ROW_OPTIONS | options)) for m, rows in zip(models, (False, True), strict=True)
    ]
    for optimizer in optimizers:
        check_plan(optimizer, split=options["split_directions"], shared=options.get("shared_memory", False))
    for step in range(count):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(batch(step).chunk(rank.size)[rank.rank]).square().mean()
            if rank.rank == 1:
                loss = loss + 1e-5 * model.module.seldom.weight.square().sum()
            loss.backward()
            optimizer.step()
    for model in models:
        equal_everywhere(model.module)
    torch.testing.assert_close(flat(models[0].module), flat(models[1].module), rtol=1e-9, atol=1e-9)
    stats = optimizers[1].stats()
    return stats["row_directions"], stats["row_directions_refused"]


def test_a_penalty_on_one_rank_keeps_rows_from_being_taken() -> None:
    """Linear layers whose directions are split take rows together; after eight tries or more in vain none does."""
    cases: dict[str, Any] = {
        f"split {split}": (body_penalty, STEPS, {"split_directions": split}) for split in (False, True)
    }
    again = {
        f"again, memory {shared}": (body_penalty, 18, {"split_directions": True, "shared_memory": shared})
        for shared in (False, True)
    }
    found = values_in_one_group(cases | again, 3)
    # Steps 0, 3, 6, 9 and 12 make inverses: of the eight between them each had one layer of three in vain.
    assert found == {name: [(10, 5)] * 3 for name in cases} | {name: [(16, 8)] * 3 for name in again}
