"""What "dear" refuses around the state of its optimizer: copies, damaged states, functions that look elsewhere."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from harness import Rank, elapsed_error, launch, run_ranks
from largest import largest
from sharded import PHASES, Pair, adamw, check_within, each_in_ways, made, mlp

pytestmark = pytest.mark.sanitize


def after_copies(rank: Rank, fallback: bool) -> float:
    """An attached optimizer is not copied, and a detached one is."""
    pair = Pair(rank, made(mlp), adamw, fallback=fallback).run(2)
    for made_of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an attached optimizer cannot be copied or pickled"):
            made_of(pair.optimizer)
    pair.run(2)
    worst = pair.done()
    copied = copy.deepcopy(pair.optimizer)
    assert copied.state_dict()["state"].keys() == pair.plain.state_dict()["state"].keys()
    return worst


def after_checkpoint_functions(rank: Rank, fallback: bool) -> float:
    """Torch's functions, which look for the model's parameters in the optimizer, save and load as with plain DDP."""
    from torch.distributed.checkpoint import state_dict as functions

    pair = Pair(rank, made(mlp), adamw, fallback=fallback).run(3)
    ours = functions.get_state_dict(pair.ddp, pair.optimizer)
    expected = functions.get_state_dict(pair.twin, pair.plain)
    worst = 0.0
    assert ours[1].keys() == expected[1].keys() and ours[1]["state"].keys() == expected[1]["state"].keys()
    for name, values in expected[1]["state"].items():
        for key, value in values.items():
            worst = largest(worst, float((ours[1]["state"][name][key] - value).abs().max()))
    saved = [copy.deepcopy(state) for state in (ours, expected)]
    pair.run(3)
    made_anew = Pair(rank, made(mlp), adamw, fallback=fallback)  # and one that has not been stepped
    for target in (pair, made_anew):
        for model, optimizer, state in zip(
            (target.ddp, target.twin), (target.optimizer, target.plain), copy.deepcopy(saved), strict=True
        ):
            functions.set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
        worst = largest(worst, target.run(3).done())
    return worst


def body_copies(rank: Rank) -> dict[str, float]:
    return {f"{fallback=}": after_copies(rank, fallback) for fallback in PHASES}


def body_checkpoint_functions(rank: Rank) -> dict[str, float]:
    return {f"{fallback=}": after_checkpoint_functions(rank, fallback) for fallback in PHASES}


def test_copies_and_functions_that_look_for_parameters_in_the_optimizer() -> None:
    for worst in run_ranks(each_in_ways, 2, [body_copies, body_checkpoint_functions]):
        check_within(worst)


def _without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


def refused_states(rank: Rank, fallback: bool) -> list[str]:
    pair = Pair(rank, made(mlp), adamw, fallback=fallback)
    trained = Pair(rank, made(mlp), adamw, fallback=fallback).run(3)
    good = trained.sync.optimizer_state_dict()
    damaged: list[tuple[Any, str]] = [
        (3, "is of type int, must be a mapping"),
        ({**good, "step": 1}, "has the key 'step', must be"),
        ({**good, "x.step": 1}, "has the key 'x.step', must be"),
        ({**good, 7: 1}, "has the key 7, must be"),
        ({**good, "99.step": torch.tensor(1.0)}, "'99.step': the parameters stepped are 0, 1, 2, 3, 4, 5;"),
        ({**good, "0.momentum": torch.tensor(1.0)}, "'0.momentum': this optimizer keeps step, exp_avg, exp_avg_sq"),
        (_without(good, "0.exp_avg"), "lacks '0.exp_avg'"),
        ({**good, "0.exp_avg": torch.zeros(3)}, r"'0.exp_avg' is a tensor of shape \[3\] and .* must be a tensor of"),
        ({**good, "0.step": torch.zeros(2)}, r"'0.step' is a tensor of shape \[2\] .* shape \[\] and torch.float32"),
        ({**good, "0.exp_avg": good["0.exp_avg"].double()}, "'0.exp_avg' .* torch.float64 on this rank"),
        ({**good, "0.exp_avg": None}, "'0.exp_avg' is of type NoneType"),
    ]
    for runs in range(2):  # before there is any state, and after
        pair.run(runs * 3)
        before = {key: copy.copy(value) for key, value in pair.sync.optimizer_state_dict().items()}
        for state, text in damaged:
            with pytest.raises((TypeError, ValueError), match=text):
                pair.sync.load_optimizer_state_dict(state)
        with pytest.raises(ValueError if rank.rank else RuntimeError, match="lacks" if rank.rank else "rank 4 could"):
            pair.sync.load_optimizer_state_dict(_without(good, "0.exp_avg") if rank.rank else good)
        none = {key: value for key, value in good.items() if not key.startswith("1.")}
        with pytest.raises(ValueError, match="different keys"):
            pair.sync.load_optimizer_state_dict(none if rank.rank else good)
        after = pair.sync.optimizer_state_dict()
        assert after.keys() == before.keys()
        for key, value in before.items():
            assert torch.equal(*(v.to_local() if hasattr(v, "to_local") else v for v in (value, after[key])))
    assert pair.difference() < 1e-5
    pair.sync.load_optimizer_state_dict(good)
    return sorted(good)


def body_damaged_state(rank: Rank) -> dict[str, list[str]]:
    return {f"{fallback=}": refused_states(rank, fallback) for fallback in PHASES}


def test_a_damaged_optimizer_state_is_refused_on_all_ranks() -> None:
    keys = run_ranks(each_in_ways, 5, [body_damaged_state], deadline=120)  # one has nothing of the last bias
    assert all(of_rank == keys[0] for of_rank in keys)


def body_state_on_rank_0(rank: Rank) -> tuple[str, str, float] | None:
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw, timeout=5).run(2)
    if rank.rank > 0:
        rank.pause()
        return None
    return elapsed_error(pair.optimizer.state_dict)


def test_optimizer_state_on_rank_0_alone_is_an_error_that_says_why() -> None:
    with launch(body_state_on_rank_0, 3) as ranks:
        outcome = ranks.outcomes([0], deadline=40)[0]
        assert outcome.ok, outcome.trace
        kind, message, seconds = outcome.value
        assert "state_dict() is collective" in message, (kind, message)
        assert seconds < 20
        ranks.proceed([1, 2])
