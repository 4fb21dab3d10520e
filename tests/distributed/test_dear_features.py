"""What people do around the training loop, with "dear": equal to single-process training on the whole batch."""

from __future__ import annotations

import copy
import io
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from sharded import FORMS, Branches, Pair, Transformer, adamw, batch, difference, in_form, made, mlp, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

EXACT = 1e-5

SIZES = [1, 2, 3, 4]


def body_accumulation(rank: Rank) -> list[float]:
    rank.init("dear")
    worst = []
    for no_sync in (True, False):  # without no_sync every micro-batch is exchanged, which must not count twice
        pair = Pair(rank, made(mlp), adamw)
        for step in range(6):
            pair.optimizer.zero_grad(set_to_none=step % 2 == 0)
            pair.plain.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3):
                if no_sync and micro < 2:
                    with pair.ddp.no_sync():
                        own, whole = pair.losses(3 * step + micro)
                        own.backward()
                else:
                    own, whole = pair.losses(3 * step + micro)
                    own.backward()
                whole.backward()
            pair.optimizer.step()
            pair.plain.step()
        worst.append(pair.done())
    return worst


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_gradient_accumulation(size: int, form: str) -> None:
    for worst in run_ranks(in_form, size, form, body_accumulation):
        assert max(worst) < EXACT, worst


class Late(torch.autograd.Function):
    """Its backward pass takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """Layers whose gradients come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Late.apply(torch.tanh(layer(x)), self.seconds)
        return x


def body_slow(rank: Rank) -> float:
    """One rank waits, in its next forward pass, for exchanges that the other posts at its leisure."""
    rank.init("dear")
    timeout = 2.5
    pair = Pair(rank, made(Slow), sgd, timeout=timeout).run(4)
    pair.zero_grad()
    pair.module.seconds = 0.6 * timeout if rank.rank == 1 else 0.0
    pair.losses()[0].backward()
    pair.module.seconds = 0.0
    pair.step()
    return pair.done()


def test_a_long_queue_of_exchanges_is_no_failure() -> None:
    assert max(run_ranks(body_slow, 2)) < EXACT


def body_groups_and_schedules(rank: Rank) -> float:
    rank.init("dear")

    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.SGD(
            [{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "weight_decay": 0.1}],
            lr=0.01,
            momentum=0.9,
        )

    pair = Pair(rank, made(mlp), two_groups)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3) for o in (pair.optimizer, pair.plain)]
    warm = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4) for o in (pair.optimizer, pair.plain)]
    for _ in range(10):
        pair.step()
        for schedule in (*schedules, *warm):
            schedule.step()
    assert pair.optimizer.param_groups[0]["lr"] == pair.plain.param_groups[0]["lr"]
    return pair.done()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_parameter_groups_and_lr_schedules(size: int, form: str) -> None:
    assert max(run_ranks(in_form, size, form, body_groups_and_schedules)) < EXACT


def body_scaler(rank: Rank) -> tuple[float, list[float]]:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd)

    def clip() -> None:
        pair.sync.clip_grad_norm_(0.3)
        nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.3)

    scales = pair.run_scaled(clip)
    return pair.done(), scales


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_grad_scaler_skips_on_all_ranks_or_none(size: int, form: str) -> None:
    results = run_ranks(in_form, size, form, body_scaler)
    assert max(worst for worst, _ in results) < EXACT
    scales = results[0][1]
    assert scales[3] < scales[2] and scales[6] > scales[3] > 0  # it went down, and up


def body_freezing(rank: Rank) -> float:
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw, find_unused_parameters=True)
    for step in range(9):
        for module in (pair.module, pair.twin):
            module[2].requires_grad_(not 3 <= step < 6)
        pair.step()
    return pair.done()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_frozen_later_and_unfrozen_again(size: int, form: str) -> None:
    assert max(run_ranks(in_form, size, form, body_freezing)) < EXACT


def body_branch_by_rank(rank: Rank, steps: int = 6, **options: Any) -> float:
    """Ranks use different branches: a parameter that some do not use has the others' gradient."""
    rank.init("dear")
    pair = Pair(rank, made(Branches), adamw, find_unused_parameters=True, **options)
    for _ in range(steps):
        pair.optimizer.zero_grad()
        pair.plain.zero_grad()
        pair.module.choice = rank.rank
        pair.losses()[0].backward()
        inputs, targets = batch(pair.steps, rank.size)
        for part in range(rank.size):
            pair.twin.choice = part
            rows = slice(part, None, rank.size)
            (cross_entropy(pair.twin(inputs[rows]), targets[rows]) / rank.size).backward()
        pair.optimizer.step()
        pair.plain.step()
        pair.steps += 1
    assert pair.module.never.weight.grad is None or not pair.module.never.weight.grad.any()
    return pair.done()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_branches_that_only_some_ranks_use(size: int, form: str) -> None:
    assert max(run_ranks(in_form, size, form, body_branch_by_rank)) < EXACT


def body_looking(rank: Rank) -> float:
    """Parameters are complete whenever somebody looks, right after the step."""
    rank.init("dear")
    pair = Pair(rank, made(Transformer), adamw)
    inputs = batch(99, 4)[0]
    average = AveragedModel(pair.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected_average = AveragedModel(pair.twin, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    worst = 0.0
    for step in range(12):
        pair.step()
        if step % 4 == 0:
            pair.ddp.eval()
            pair.twin.eval()
            with torch.no_grad():
                worst = max(worst, float((pair.ddp(inputs) - pair.twin(inputs)).abs().max()))
                worst = max(worst, float((pair.ddp.module(inputs) - pair.twin(inputs)).abs().max()))
            pair.ddp.train()
            pair.twin.train()
        elif step % 4 == 1:
            buffer = io.BytesIO()
            torch.save(pair.ddp.state_dict(), buffer)
            buffer.seek(0)
            other = made(Transformer)
            other.load_state_dict({k.removeprefix("module."): v for k, v in torch.load(buffer).items()})
            worst = max(worst, difference(other, pair.twin))
        elif step % 4 == 2:
            average.update_parameters(pair.module)
            expected_average.update_parameters(pair.twin)
            worst = max(worst, difference(average.module, expected_average.module))
            worst = max(worst, difference(copy.deepcopy(pair.module), pair.twin))
        else:
            with pair.sync.averaged() as module:
                worst = max(worst, difference(module, pair.twin))
            pair.sync.synchronize()
    clone = copy.deepcopy(pair.module).eval()
    worst = max(worst, float((clone(inputs) - pair.twin.eval()(inputs)).abs().max()))
    pair.twin.train()
    assert pair.sync.stats()["steps"] == 12
    return max(worst, pair.done())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_complete_whenever_looked_at(size: int, form: str) -> None:
    assert max(run_ranks(in_form, size, form, body_looking)) < EXACT


def body_closure(rank: Rank) -> float:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd)
    for _ in range(5):

        def closure(ours: bool) -> torch.Tensor:
            (pair.optimizer if ours else pair.plain).zero_grad()
            loss = pair.losses()[0 if ours else 1]
            loss.backward()
            return loss

        pair.optimizer.step(lambda: closure(True))
        pair.plain.step(lambda: closure(False))
        pair.steps += 1
    return pair.done()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_closures(size: int, form: str) -> None:
    assert max(run_ranks(in_form, size, form, body_closure)) < EXACT


def body_detach(rank: Rank) -> float:
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw).run(5)
    pair.sync.detach()
    pair.sync.detach()
    assert all(type(p) is nn.Parameter for group in pair.optimizer.param_groups for p in group["params"])
    return difference(pair.run(5).module, pair.twin)


@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_after_detach(form: str) -> None:
    assert max(run_ranks(in_form, 2, form, body_detach)) < EXACT


def body_collectives(rank: Rank) -> float:
    """Collectives of the user in the middle of everything, and two models in turn."""
    rank.init("dear")
    pairs = [Pair(rank, made(mlp), sgd), Pair(rank, made(Transformer), adamw)]
    for step in range(8):
        for pair in pairs:
            pair.step()
            total = torch.full((50_000,), float(rank.rank + step))
            dist.all_reduce(total, group=pair.group)
            assert total[-1] == sum(range(rank.size)) + rank.size * step
    return max(pair.done() for pair in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_two_models_and_the_users_collectives(form: str) -> None:
    assert max(run_ranks(in_form, 3, form, body_collectives)) < EXACT
