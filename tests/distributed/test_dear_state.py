"""The state of an optimizer under "dear", saved and loaded: the plain optimizer's, and in shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from sharded import FORMS, Pair, Transformer, adamw, batch, difference, in_form, made, mlp
from torch import nn
from torch.nn.functional import cross_entropy

EXACT = 1e-5


def body_plain_checkpoint(rank: Rank) -> float:
    """optimizer.state_dict() is the plain optimizer's, and is loaded from it."""
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw).run(4)
    state, expected = pair.optimizer.state_dict(), pair.plain.state_dict()
    assert state.keys() == expected.keys() and state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(state["state"][index][key], value, rtol=1e-4, atol=1e-7)
    # Ours into a plain optimizer, which goes on; a plain one's into ours.
    twin = copy.deepcopy(pair.twin)
    twin.load_state_dict(pair.module.state_dict())
    plain = adamw(twin.parameters())
    plain.load_state_dict(state)
    other = Pair(rank, made(mlp), adamw)
    other.module.load_state_dict(pair.twin.state_dict())
    other.optimizer.load_state_dict(expected)
    other.twin, other.plain, other.steps = twin, plain, pair.steps
    return max(other.run(4).done(), pair.run(4).done())


@pytest.mark.parametrize("form", FORMS)
def test_optimizer_state_is_the_plain_optimizers(form: str) -> None:
    assert max(run_ranks(in_form, 3, form, body_plain_checkpoint)) < EXACT


def body_save_sharded(rank: Rank, folder: str, steps: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    rank.init("dear")
    pair = Pair(rank, made(Transformer), adamw)
    # The batch is the same whatever the number of ranks: 12 rows.
    _train_on_twelve_rows(pair, steps)
    state = {"model": pair.module.state_dict(), "optimizer": pair.sync.optimizer_state_dict()}
    checkpoint.save(state, checkpoint_id=folder)
    pair.sync.detach()


def body_load_sharded(rank: Rank, folder: str, before: int, after: int) -> float:
    import torch.distributed.checkpoint as checkpoint

    rank.init("dear")
    pair = Pair(rank, made(Transformer), adamw)
    expected = copy.deepcopy(pair.twin)
    plain = adamw(expected.parameters())
    for step in range(before + after):
        plain.zero_grad()
        inputs, targets = batch(step, 3)
        cross_entropy(expected(inputs), targets).backward()
        plain.step()
    _train_on_twelve_rows(pair, 1)  # so that there is state to load into
    state = {"model": pair.module.state_dict(), "optimizer": pair.sync.optimizer_state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    pair.module.load_state_dict(state["model"])
    pair.sync.load_optimizer_state_dict(state["optimizer"])
    pair.steps = before
    _train_on_twelve_rows(pair, after)
    pair.sync.wait()
    worst = difference(pair.module, expected)
    pair.sync.detach()
    return worst


def _train_on_twelve_rows(pair: Pair, steps: int) -> None:
    for _ in range(steps):
        inputs, targets = batch(pair.steps, 3)
        own = slice(pair.rank, None, pair.size)
        pair.optimizer.zero_grad()
        cross_entropy(pair.ddp(inputs[own]), targets[own]).backward()
        pair.optimizer.step()
        pair.steps += 1


def test_sharded_checkpoint_at_another_world_size(tmp_path: Path) -> None:
    run_ranks(body_save_sharded, 3, str(tmp_path), 5)
    for size in (2, 4):
        assert max(run_ranks(body_load_sharded, size, str(tmp_path), 5, 5)) < EXACT


def body_restart(rank: Rank, folder: str, before: bool, after: bool) -> float:
    """Saves in one mode, and loads before the first step in another: True is plain all-reduce."""
    import torch.distributed.checkpoint as checkpoint

    rank.init("dear")
    old = Pair(rank, made(mlp), adamw, fallback=before).run(4)
    assert old.sync.stats()["mode"] == ("allreduce" if before else "dear")
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


@pytest.mark.parametrize(("before", "after"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("form", FORMS)
def test_sharded_checkpoint_of_a_new_job(form: str, before: bool, after: bool, tmp_path: Any) -> None:
    assert max(run_ranks(in_form, 2, form, body_restart, str(tmp_path), before, after)) < EXACT


def body_going_back(rank: Rank) -> float:
    """Loads right after a step, when parameters or gradients are on their way: that would undo what was loaded."""
    rank.init("dear")
    worst = 0.0
    for fallback in (False, True):
        for part in (False, True):
            pair = Pair(rank, made(wide), adamw, bucket_mb=0.05, fallback=fallback).run(3)
            model, state = copy.deepcopy((pair.twin.state_dict(), pair.plain.state_dict()))
            pair.run(2)
            if part:
                pair.module[2].load_state_dict(pair.twin[2].state_dict())
            pair.module.load_state_dict(model)
            pair.twin.load_state_dict(model)
            pair.optimizer.load_state_dict(copy.deepcopy(state))
            pair.plain.load_state_dict(state)
            worst = max(worst, pair.run(3).done())
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_loading_right_after_a_step(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_going_back)) < EXACT


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4))
