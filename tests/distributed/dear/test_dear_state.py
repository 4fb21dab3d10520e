"""The state of an optimizer under "dear", saved and loaded: the plain optimizer's, and in shards."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from largest import largest
from sharded import (
    FORMS,
    PHASES,
    PLAIN,
    SIZES,
    SIZES_AND_DTYPES,
    Pair,
    Transformer,
    adamw,
    adamw_or_sgd,
    batch,
    check_within,
    difference,
    in_forms,
    made,
    mlp,
)
from test_dear_known_faults import check_beside_a_fault, in_forms_and_at_fault, late
from torch import nn
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.sanitize


def body_full(rank: Rank) -> dict[str, float]:
    """optimizer.state_dict() is the plain optimizer's, and is loaded from it."""
    pair = Pair(rank, made(mlp), adamw_or_sgd).run(4)
    state, expected = pair.optimizer.state_dict(), pair.plain.state_dict()
    assert state.keys() == expected.keys() and state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    apart = [
        float((state["state"][index][key] - value).abs().max() / value.abs().max())
        for index, values in expected["state"].items()
        for key, value in values.items()
    ]
    # What is attached goes on from the plain optimizer's state, and a plain optimizer from ours.
    other = Pair(rank, made(mlp), adamw_or_sgd)
    other.module.load_state_dict(pair.twin.state_dict())
    other.twin.load_state_dict(pair.module.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(expected))
    other.plain.load_state_dict(copy.deepcopy(state))
    other.steps = pair.steps
    other.run(4).done()
    pair.run(4)
    return {
        "the state": largest(apart),
        "loaded from the plain optimizer": difference(other.module, pair.twin),
        "loaded into the plain optimizer": difference(other.twin, pair.twin),
        "going on": pair.done(),
    }


def late_and_not_loaded(pair: Pair) -> None:
    late(pair)
    pair.optimizer.load_state_dict = pair.plain.load_state_dict = lambda _: None  # type: ignore[method-assign]


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_optimizer_state_is_the_plain_optimizers(size: int, dtype: str) -> None:
    for found in run_ranks(in_forms_and_at_fault, size, dtype, body_full, late_and_not_loaded):
        check_beside_a_fault(found, dtype)


BEFORE, AFTER = 5, 5  # steps


def train_on_twelve_rows(pair: Pair, steps: int) -> Pair:
    """The batch is the same whatever the number of ranks, and so is what the twin becomes."""
    for _ in range(steps):
        inputs, targets = batch(pair.steps, 3)
        own = slice(pair.rank, None, pair.size)
        pair.zero_grad()
        cross_entropy(pair.ddp(inputs[own]).float(), targets[own]).backward()
        cross_entropy(pair.twin(inputs).float(), targets).backward()
        pair.update()
    return pair


def body_save_sharded(rank: Rank, dtype: str, folder: str) -> float:
    """Returns how far DDP alone gets at this world size."""
    import torch.distributed.checkpoint as checkpoint

    rank.init("dear")
    Pair.dtype = getattr(torch, dtype)
    for form in FORMS:
        pair = train_on_twelve_rows(Pair(rank, made(Transformer), adamw_or_sgd, form=form), BEFORE)
        state = {"model": pair.module.state_dict(), "optimizer": pair.sync.optimizer_state_dict()}
        checkpoint.save(state, checkpoint_id=f"{folder}/{form}")
        pair.sync.detach()
    return train_on_twelve_rows(Pair(rank, made(Transformer), adamw_or_sgd, form=PLAIN), BEFORE + AFTER).difference()


def body_load_sharded(rank: Rank, dtype: str, folder: str) -> dict[str, dict[str, float]]:
    import torch.distributed.checkpoint as checkpoint

    rank.init("dear")
    Pair.dtype = getattr(torch, dtype)
    alone = train_on_twelve_rows(Pair(rank, made(Transformer), adamw_or_sgd, form=PLAIN), BEFORE + AFTER)
    found = {PLAIN: {"": alone.difference()}}
    for form in FORMS:
        pair = train_on_twelve_rows(Pair(rank, made(Transformer), adamw_or_sgd, form=form), 1)  # has state to load into
        state = {"model": pair.module.state_dict(), "optimizer": pair.sync.optimizer_state_dict()}
        checkpoint.load(state, checkpoint_id=f"{folder}/{form}")
        pair.module.load_state_dict(state["model"])
        pair.sync.load_optimizer_state_dict(state["optimizer"])
        pair.steps = BEFORE
        train_on_twelve_rows(pair, AFTER).sync.wait()
        found[form] = {"": difference(pair.module, alone.twin)}
        pair.sync.detach()
    lost = train_on_twelve_rows(Pair(rank, made(Transformer), adamw_or_sgd, form=PLAIN), BEFORE)
    lost.plain.state.clear()
    found["fault"] = {"": difference(train_on_twelve_rows(lost, AFTER).twin, alone.twin)}
    return found


@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), *SIZES_AND_DTYPES])
def test_sharded_checkpoint_at_another_world_size(size: int, dtype: str, tmp_path: Path) -> None:
    rounding = largest(run_ranks(body_save_sharded, size, dtype, str(tmp_path)))
    for other in (size % 4 + 1, (size - 2) % 4 + 1):
        for found in run_ranks(body_load_sharded, other, dtype, str(tmp_path)):
            found[PLAIN][""] = largest(found[PLAIN][""], rounding)  # the steps at both sizes round
            check_beside_a_fault(found, dtype)


def restart(rank: Rank, folder: str, before: bool, after: bool) -> float:
    """Saves in one mode, and loads before the first step in another: True is plain all-reduce."""
    import torch.distributed.checkpoint as checkpoint

    old = Pair(rank, made(mlp), adamw, fallback=before).run(4)
    assert old.sync.stats()["mode"] == ("allreduce" if before and rank.size > 1 else "dear")
    saved = {"model": old.module.state_dict(), "optimizer": old.sync.optimizer_state_dict()}
    checkpoint.save(saved, checkpoint_id=folder)
    new = Pair(rank, made(mlp), adamw, fallback=after)
    state: dict[str, Any] = {"model": new.module.state_dict(), "optimizer": new.sync.optimizer_state_dict()}
    assert state["optimizer"].keys() == saved["optimizer"].keys() != set()
    assert not new.optimizer.state  # a look at it is not a step
    checkpoint.load(state, checkpoint_id=folder)
    new.module.load_state_dict(state["model"])
    new.sync.load_optimizer_state_dict(state["optimizer"])
    new.twin, new.plain, new.steps = old.twin, old.plain, old.steps
    old.sync.detach()
    return new.run(4).done()


def body_restart(rank: Rank, folder: str) -> dict[str, float]:
    return {
        f"{before=} {after=}": restart(rank, f"{folder}/{Pair.form}-{before}-{after}", before, after)
        for before, after in itertools.product(PHASES, PHASES)
    }


@pytest.mark.parametrize("size", SIZES)
def test_sharded_checkpoint_of_a_new_job(size: int, tmp_path: Path) -> None:
    for worst in run_ranks(in_forms, size, body_restart, str(tmp_path)):
        check_within(worst)


def body_going_back(rank: Rank) -> dict[str, float]:
    """Loads right after a step, when parameters or gradients are on their way: that would undo what was loaded."""
    found = {}
    for fallback, part in itertools.product(PHASES, (False, True)):
        pair = Pair(rank, made(wide), adamw, bucket_mb=0.05, fallback=fallback).run(3)
        model, state = copy.deepcopy((pair.twin.state_dict(), pair.plain.state_dict()))
        pair.run(2)
        if part:
            pair.module[2].load_state_dict(pair.twin[2].state_dict())
        pair.module.load_state_dict(model)
        pair.twin.load_state_dict(model)
        pair.optimizer.load_state_dict(copy.deepcopy(state))
        pair.plain.load_state_dict(state)
        found[f"{fallback=} {part=}"] = pair.run(3).done()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_loading_right_after_a_step(size: int) -> None:
    for worst in run_ranks(in_forms, size, body_going_back):
        check_within(worst)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4))
