"""Training loops that are not the plain one, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from sharded import FORMS, Pair, adamw, in_form, made, mlp, sgd
from torch import nn

EXACT = 1e-5


def wide() -> nn.Module:
    """Large enough that exchanges are still on their way when the next thing happens."""
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))


def body_dropped(rank: Rank, then: str) -> float:
    rank.init("dear")
    pair = Pair(rank, made(wide), sgd, bucket_mb=0.05)
    for _ in range(40):
        pair.losses(pair.steps + 1000)[0].backward()
        pair.optimizer.zero_grad()
        pair.plain.zero_grad()
        if then == "step":  # it has nothing to step with
            pair.optimizer.step()
        for loss in pair.losses():
            loss.backward()
        if then == "clip":
            pair.sync.clip_grad_norm_(0.05)
            nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.05)
        for optimizer in (pair.optimizer, pair.plain):
            optimizer.step()
            optimizer.zero_grad()
        pair.steps += 1
    return pair.done()


@pytest.mark.parametrize("then", ["", "step", "clip"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_dropped(form: str, then: str) -> None:
    """A batch is skipped, or a loss reaches a model that is not trained by it (adversarial training)."""
    assert max(run_ranks(in_form, 2, form, body_dropped, then)) < EXACT


def body_reading(rank: Rank) -> float:
    rank.init("dear")
    pair = Pair(rank, made(wide), adamw)
    worst = 0.0

    def compare(read: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
        return max(float((a - b).detach().abs().max()) for a, b in zip(read, expected, strict=True))

    for _ in range(5):
        pair.step()
        worst = max(worst, compare(pair.ddp.parameters(), pair.twin.parameters()))
        pair.step()
        worst = max(worst, compare((p for _, p in pair.ddp.named_parameters()), pair.twin.parameters()))
        pair.step()
        worst = max(worst, compare(pair.module[2].parameters(), pair.twin[2].parameters()))
    return max(worst, pair.done())


@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_the_wrapper_and_of_a_part(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_reading)) < 1e-4


def body_fused_scaler(rank: Rank) -> float:
    rank.init("dear")
    pair = Pair(rank, made(mlp), lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True))
    ours, plain = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2))
    for step in range(12):
        pair.optimizer.zero_grad()
        pair.plain.zero_grad()
        factor = float("inf") if step in (3, 7) else 1.0
        for scaler, optimizer, loss in zip((ours, plain), (pair.optimizer, pair.plain), pair.losses(), strict=True):
            scaler.scale(loss * factor).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert ours.get_scale() == plain.get_scale()
        pair.steps += 1
    assert not hasattr(pair.optimizer, "grad_scale") and not hasattr(pair.optimizer, "found_inf")
    return pair.done()


@pytest.mark.parametrize("form", FORMS)
def test_a_fused_optimizer_unscales_its_own_gradients(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_fused_scaler)) < EXACT


def body_clipped_doubles(rank: Rank) -> bool:
    rank.init("dear")
    pair = Pair(rank, made(mlp, torch.float64), sgd)
    pair.losses()[0].backward()
    for refused in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"max_norm must be 0 or more, got {refused}"):
            pair.sync.clip_grad_norm_(refused)
    norm = pair.sync.clip_grad_norm_(1e-3)
    # What it has left, of the slices of all ranks.
    left = torch.zeros((), dtype=torch.float64)
    for parameter in pair.optimizer.param_groups[0]["params"]:
        left += parameter.grad.square().sum()
    if not pair.sync._core.replicated:
        dist.all_reduce(left)
    expected = 1e-3 * norm / (norm + 1e-6)
    return norm.dtype == torch.float64 and abs(float(left.sqrt() / expected) - 1) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_clipping_keeps_the_precision_of_doubles(form: str) -> None:
    assert run_ranks(in_form, 2, form, body_clipped_doubles) == [True, True]


def body_views(rank: Rank) -> float:
    rank.init("dear")
    worst = 0.0
    for fallback in (False, True):
        pair = Pair(rank, made(mlp), sgd, fallback=fallback, gradient_as_bucket_view=True)
        for _ in range(6):
            pair.optimizer.zero_grad(set_to_none=False)
            pair.plain.zero_grad(set_to_none=False)
            for loss in pair.losses():
                loss.backward()
            pair.optimizer.step()
            pair.plain.step()
            pair.steps += 1
        worst = max(worst, pair.done())
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_views_of_buckets_are_set_to_zero(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_views)) < EXACT


def body_compiled(rank: Rank) -> float:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd)
    pair.ddp = torch.compile(pair.ddp, backend="eager")  # type: ignore[assignment]
    return pair.run(6).done()


@pytest.mark.parametrize("form", FORMS)
def test_compiled_after_attach(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_compiled)) < EXACT


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
