"""Training loops that are not the plain one, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
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
        pair.zero_grad()
        if then == "step":  # it has nothing to step with
            pair.optimizer.step()
        pair.backward()
        if then == "clip":
            pair.sync.clip_grad_norm_(0.05)
            nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.05)
        pair.update()
        pair.zero_grad()
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
    pair.run_scaled()
    assert not hasattr(pair.optimizer, "grad_scale") and not hasattr(pair.optimizer, "found_inf")
    return pair.done()


@pytest.mark.parametrize("form", FORMS)
def test_a_fused_optimizer_unscales_its_own_gradients(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_fused_scaler)) < EXACT


def body_views(rank: Rank) -> float:
    rank.init("dear")
    worst = 0.0
    for fallback in (False, True):
        pair = Pair(rank, made(mlp), sgd, fallback=fallback, gradient_as_bucket_view=True)
        for _ in range(6):
            pair.zero_grad(set_to_none=False)
            pair.backward()
            pair.update()
        worst = max(worst, pair.done())
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_views_of_buckets_are_set_to_zero(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_views)) < EXACT


def body_compiled(rank: Rank, fallback: bool) -> float:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, fallback=fallback)
    pair.ddp = torch.compile(pair.ddp, backend="eager")  # type: ignore[assignment]
    return pair.run(6).done()


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_after_attach(form: str, fallback: bool) -> None:
    assert max(run_ranks(in_form, 2, form, body_compiled, fallback)) < EXACT


def drop_by_hand(pair: Pair) -> None:
    for optimizer in (pair.optimizer, pair.plain):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def drop_first(pair: Pair) -> None:
    for optimizer in (pair.optimizer, pair.plain):
        optimizer.param_groups[0]["params"][0].grad = None


def dropped_before(pair: Pair) -> None:
    drop_by_hand(pair)
    pair.backward()
    pair.update()


def dropped_after(pair: Pair) -> None:
    """The replicated form has not done the step yet."""
    pair.backward()
    pair.update()
    drop_by_hand(pair)


def dropped_between(pair: Pair) -> None:
    """Of two batches the second counts."""
    pair.zero_grad()
    pair.backward()
    drop_first(pair)
    pair.steps += 1
    pair.backward()
    pair.update()


def dropped_and_clipped(pair: Pair) -> None:
    pair.zero_grad()
    pair.backward()
    drop_first(pair)
    pair.sync.clip_grad_norm_(0.05)
    nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.05)
    pair.update()


def body_dropped_by_hand(rank: Rank) -> dict[str, float]:
    rank.init("dear")
    worst = {}
    for step in (dropped_before, dropped_after, dropped_between, dropped_and_clipped):
        for fallback in (False, True):
            pair = Pair(rank, made(wide), sgd, bucket_mb=0.05, fallback=fallback)
            for _ in range(5):
                step(pair)
            worst[f"{step.__name__} {fallback}"] = pair.done()
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_dropped_in_the_optimizer(form: str) -> None:
    for worst in run_ranks(in_form, 2, form, body_dropped_by_hand):
        assert max(worst.values()) < EXACT, str(worst)


class Counting(torch.optim.SGD):
    """Does something in zero_grad()."""

    elementwise = True
    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


def body_own_zero_grad(rank: Rank) -> float:
    rank.init("dear")
    worst = 0.0
    for fallback in (False, True):
        pair = Pair(rank, made(wide), lambda parameters: Counting(parameters, lr=0.1), fallback=fallback)
        for step in range(6):
            pair.zero_grad(set_to_none=step % 2 == 0)
            pair.backward()
            pair.update()
        worst = max(worst, pair.done())
        pair.optimizer.zero_grad()
        assert pair.optimizer.cleared == pair.plain.cleared + 1 == 7  # type: ignore[attr-defined]
        assert all(parameter.grad is None for parameter in pair.module.parameters())
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_with_a_zero_grad_of_its_own(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_own_zero_grad)) < EXACT


def body_scaler_and_model(rank: Rank) -> tuple[list[float], float]:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, timeout=8)
    overflow = False

    def one_element(gradient: torch.Tensor) -> torch.Tensor:  # which is in the slice of one rank
        return gradient.index_fill(0, torch.tensor(0), float("inf")) if overflow else gradient

    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for module in (pair.module, pair.twin):
        module[0].bias.register_hook(one_element)
    scales = []
    for step in range(6):
        overflow = step in (1, 2)
        losses, optimizers = pair.losses(), (pair.optimizer, pair.plain)
        for scaler, optimizer, loss in zip(scalers, optimizers, losses, strict=True):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        for model in (pair.ddp, pair.twin):
            model.zero_grad()
        pair.steps += 1
        scales.append(scalers[0].get_scale())
    return scales, pair.done()


@pytest.mark.parametrize("form", FORMS)
def test_a_scaler_and_the_models_own_zero_grad(form: str) -> None:
    """A skipped step, and the gradients are cleared without the optimizer."""
    for scales, worst in run_ranks(in_form, 2, form, body_scaler_and_model):
        assert scales == [2.0**10, 2.0**9, *[2.0**8] * 4]
        assert worst < EXACT
