"""Training loops that are not the plain one, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from harness import Rank, run_ranks
from largest import largest
from sharded import PHASES, SIZES, Pair, check_within, each_in_ways, made, mlp, sgd, wide


def body_dropped(rank: Rank) -> dict[str, float]:
    """A batch is skipped, or a loss reaches a model that is not trained by it (adversarial training)."""
    found = {}
    for then in ("", "step", "clip"):
        pair = Pair(rank, made(wide), sgd, bucket_mb=0.05)
        for _ in range(6):
            pair.losses(pair.steps + 1000)[0].backward()
            pair.zero_grad()
            if then == "step":  # it has nothing to step with
                pair.optimizer.step()
            pair.backward()
            if then == "clip":
                pair.clip(0.05)
            pair.update()
            pair.zero_grad()
        found[then] = pair.done()
    return found


def body_reading(rank: Rank) -> float:
    pair = Pair(rank, made(wide), sgd)
    worst = 0.0

    def compare(read: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
        return largest(float((a - b).detach().abs().max()) for a, b in zip(read, expected, strict=True))

    for _ in range(5):
        pair.step()
        worst = largest(worst, compare(pair.ddp.parameters(), pair.twin.parameters()))
        pair.step()
        worst = largest(worst, compare((p for _, p in pair.ddp.named_parameters()), pair.twin.parameters()))
        pair.step()
        worst = largest(worst, compare(pair.module[2].parameters(), pair.twin[2].parameters()))
    return largest(worst, pair.done())


def body_fused_scaler(rank: Rank) -> float:
    pair = Pair(rank, made(mlp), lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True))
    pair.run_scaled()
    assert not hasattr(pair.optimizer, "grad_scale") and not hasattr(pair.optimizer, "found_inf")
    return pair.done()


def body_views(rank: Rank) -> dict[str, float]:
    """Gradients that are views of buckets are set to zero."""
    found = {}
    for fallback in PHASES:
        pair = Pair(rank, made(mlp), sgd, fallback=fallback, gradient_as_bucket_view=True)
        for _ in range(6):
            pair.zero_grad(set_to_none=False)
            pair.backward()
            pair.update()
        found[f"{fallback=}"] = pair.done()
    return found


def body_compiled(rank: Rank) -> float:
    """Compiled after torchext.attach; by plain all-reduce first, and then not."""
    pair = Pair(rank, made(mlp), sgd, fallback=True)
    pair.ddp = torch.compile(pair.ddp, backend="eager")  # type: ignore[assignment]
    pair.run(20)
    assert rank.size == 1 or pair.sync.stats()["mode"] == "dear"
    return pair.done()


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
    pair.clip(0.05)
    pair.update()


def body_dropped_by_hand(rank: Rank) -> dict[str, float]:
    """Gradients are dropped in the optimizer."""
    worst = {}
    for step in (dropped_before, dropped_after, dropped_between, dropped_and_clipped):
        for fallback in PHASES:
            pair = Pair(rank, made(wide), sgd, bucket_mb=0.05, fallback=fallback)
            for _ in range(5):
                step(pair)
            worst[f"{step.__name__} {fallback}"] = pair.done()
    return worst


class Counting(torch.optim.SGD):
    """Does something in zero_grad()."""

    elementwise = True
    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


def body_own_zero_grad(rank: Rank) -> dict[str, float]:
    found = {}
    for fallback in PHASES:
        pair = Pair(rank, made(wide), lambda parameters: Counting(parameters, lr=0.1), fallback=fallback)
        for step in range(6):
            pair.zero_grad(set_to_none=step % 2 == 0)
            pair.backward()
            pair.update()
        found[f"{fallback=}"] = pair.done()
        pair.optimizer.zero_grad()
        assert pair.optimizer.cleared == pair.plain.cleared + 1 == 7  # type: ignore[attr-defined]
        assert all(parameter.grad is None for parameter in pair.module.parameters())
    return found


def body_scaler_and_model(rank: Rank) -> float:
    """A skipped step, and the gradients are cleared without the optimizer."""
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
    assert scales == [2.0**10, 2.0**9, *[2.0**8] * 4]
    return pair.done()


BODIES = [
    *(body_dropped, body_reading, body_fused_scaler, body_views),
    *(body_compiled, body_dropped_by_hand, body_own_zero_grad, body_scaler_and_model),
]


@pytest.mark.parametrize("size", SIZES)
def test_loops(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES, deadline=120):
        check_within(worst)
