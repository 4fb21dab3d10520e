"""Training with an attached model: what is averaged, when, and how it lives with the rest of a training loop.

Many checks share one world: each makes a group of its own inside it.
"""

from __future__ import annotations

import math
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

GENERATORS = ("smart", "division", "random", "static", "ready-set")
ORDERS = ("atc", "cta")


def prague(**options: Any) -> dist.ProcessGroup:
    return dist.new_group(backend="prague", timeout=timedelta(seconds=30), pg_options=torchext.PragueOptions(**options))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(rank: int, step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.rand(rows, 8, generator=generator) * 2 - 1
    return inputs, torch.tanh(inputs[:, :4].sum(1, keepdim=True)) + 0.5 * inputs[:, 4:5]


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    """What every rank passed, stacked."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def equal_everywhere(module: nn.Module) -> None:
    all_ = everywhere(flat(module))
    assert (all_ == all_[0]).all(), (all_ - all_[0]).abs().max()


class Trainer:
    """A small regression on one rank, attached."""

    def __init__(
        self,
        rank: Rank,
        *,
        model: nn.Module | None = None,
        lr: float = 0.1,
        ddp: dict[str, Any] | None = None,
        bucket_mb: float = 0.001,
        **options: Any,
    ) -> None:
        self.rank = rank.rank
        self.group = prague(**options)
        self.module = model if model is not None else mlp()
        self.ddp = DistributedDataParallel(self.module, process_group=self.group, **(ddp or {}))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=lr)
        self.sync = torchext.attach(self.ddp, self.optimizer, bucket_mb=bucket_mb)
        self.step_count = 0

    def loss(self, step: int | None = None) -> torch.Tensor:
        inputs, targets = batch(self.rank, self.step_count if step is None else step)
        return nn.functional.mse_loss(self.ddp(inputs), targets)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.step_count += 1
        return float(loss.detach())

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def evaluate(self) -> float:
        """The loss of the average of all models, on data that is the same on all ranks."""
        with self.sync.averaged() as module, torch.no_grad():
            inputs, targets = batch(77, 0, rows=256)
            return float(nn.functional.mse_loss(module(inputs), targets))


# ---- Every generator, both orders ----


def body_trains(rank: Rank, order: str) -> bool:
    rank.init()
    for generator in GENERATORS:
        trainer = Trainer(rank, generator=generator, order=order)
        before = trainer.evaluate()
        trainer.run(41)  # static: not after a round of all
        trainer.sync.wait()
        stats = trainer.sync.stats()
        assert stats["steps"] == 41, stats
        assert 0 < stats["averages"] <= 60, (generator, stats)
        assert sum(stats["group_sizes"].values()) == stats["averages"]
        assert set(stats["group_sizes"]) <= {2, 3, 4}, stats
        assert stats["bytes_sent"] > 0 and stats["bucket_bytes"] >= 4 * flat(trainer.module).numel()
        assert min(v for k, v in stats.items() if k.endswith("_ms")) >= 0, stats

        with trainer.sync.averaged() as module:
            assert module is trainer.module
            average = flat(module)
            equal_everywhere(module)
            for call in (trainer.sync.synchronize, trainer.sync.averaged().__enter__, trainer.optimizer.step):
                with pytest.raises(RuntimeError, match=r"averaged\(\)"):
                    call()
        local = everywhere(flat(trainer.module))
        torch.testing.assert_close(local.mean(0), average, rtol=0, atol=1e-6)
        assert (local[0] != local[1]).any() or (local[0] != local[2]).any(), "local values did not come back"
        after = trainer.evaluate()
        assert after < 0.8 * before, (generator, before, after)
        assert torch.equal(flat(trainer.module), local[rank.rank])

        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        torch.testing.assert_close(flat(trainer.module), average, rtol=0, atol=1e-6)
        assert 0 < trainer.sync.stats()["consensus_distance"] < 1
        trainer.run(2)
        trainer.sync.detach()
    return True


@pytest.mark.parametrize("order", ORDERS)
def test_trains(order: str) -> None:
    assert run_ranks(body_trains, 4, order) == [True] * 4


def body_uneven(rank: Rank) -> bool:
    """Ranks that make different numbers of steps meet in every collective call of the synchronizer."""
    rank.init()
    for generator in ("smart", "random", "ready-set"):
        for order in ORDERS:
            trainer = Trainer(rank, generator=generator, order=order)
            trainer.run(3 + 5 * rank.rank)
            trainer.evaluate()
            trainer.run(2 * (4 - rank.rank))
            trainer.sync.synchronize()
            equal_everywhere(trainer.module)
            trainer.run(rank.rank)
            trainer.sync.detach()
    return True


def test_different_numbers_of_steps() -> None:
    assert run_ranks(body_uneven, 4) == [True] * 4


# ---- Against plain gradient descent ----


class Quadratic(nn.Module):
    """|x - b|^2 / 2 of a batch that is b itself."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-1, 1, 1000, dtype=torch.float64))

    def forward(self, b: torch.Tensor) -> torch.Tensor:
        return (self.x - b).square().sum() / 2


def body_quadratic(rank: Rank) -> float:
    rank.init()
    worst = 0.0
    target = torch.linspace(3, 5, 1000, dtype=torch.float64) * (rank.rank + 1)
    goal = everywhere(target).mean(0)
    for order in ORDERS:
        for micro_batches in (1, 3):
            trainer = Trainer(rank, model=Quadratic(), order=order, generator="static")
            mean = flat(trainer.module)
            for step in range(12):
                trainer.optimizer.zero_grad()
                for _ in range(micro_batches - 1):
                    with trainer.ddp.no_sync():
                        trainer.ddp(target).backward()
                trainer.ddp(target).backward()
                trainer.optimizer.step()
                mean -= 0.1 * micro_batches * (mean - goal)
                if step in (0, 4, 5, 11):
                    with trainer.sync.averaged() as module:
                        worst = max(worst, float((flat(module) - mean).abs().max()))
            trainer.sync.synchronize()
            worst = max(worst, float((flat(trainer.module) - mean).abs().max()))
            trainer.sync.detach()
    return worst


def test_the_mean_follows_plain_gradient_descent() -> None:
    assert max(run_ranks(body_quadratic, 4)) < 1e-12


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(inputs))


def body_batch_norm(rank: Rank) -> bool:
    rank.init()
    inputs, targets = batch(rank.rank, 0)
    inputs = inputs * (rank.rank + 1) + 3 * rank.rank
    goal_mean = everywhere(inputs.mean(0)).mean(0)
    goal_variance = everywhere(inputs.var(0)).mean(0)
    for order in ORDERS:
        for generator in ("static", "smart"):
            trainer = Trainer(rank, model=Normalized(), order=order, generator=generator)
            assert not trainer.ddp.broadcast_buffers
            for _ in range(9):
                trainer.optimizer.zero_grad()
                nn.functional.mse_loss(trainer.ddp(inputs), targets).backward()
                trainer.optimizer.step()
            trainer.sync.synchronize()
            norm = trainer.module.norm
            assert int(norm.num_batches_tracked) == 9
            for buffer in (norm.running_mean, norm.running_var):
                all_ = everywhere(buffer)
                assert (all_ == all_[0]).all()
            if generator == "static":
                # Every rank's statistics are a linear function of its batches': so is their mean.
                weight = 1 - 0.9**9
                torch.testing.assert_close(norm.running_mean, weight * goal_mean, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(
                    norm.running_var, weight * goal_variance + (1 - weight), rtol=1e-5, atol=1e-5
                )
            equal_everywhere(trainer.module)
            trainer.sync.detach()
    return True


def test_batch_norm_statistics_are_averaged() -> None:
    assert run_ranks(body_batch_norm, 4) == [True] * 4


# ---- With what training loops use ----


def check_grad_scaler(rank: Rank) -> None:
    trainer = Trainer(rank, generator="smart")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    before = trainer.evaluate()
    for step in range(30):
        trainer.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainer.loss(step)
        scaler.scale(loss).backward()
        if step == 4 and rank.rank == 1:
            next(trainer.module.parameters()).grad[0] = math.inf  # this rank alone skips its step
        scaler.step(trainer.optimizer)
        scaler.update()
    assert trainer.sync.stats()["steps"] == 30 - (rank.rank == 1)
    assert scaler.get_scale() == (2.0**7 if rank.rank == 1 else 2.0**8)
    assert trainer.evaluate() < 0.8 * before
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()


def check_schedules_groups_and_clipping(rank: Rank) -> None:
    for order in ORDERS:
        group = prague(order=order)
        ddp = DistributedDataParallel(mlp(), process_group=group)
        parameters = list(ddp.parameters())
        optimizer = torch.optim.AdamW(
            [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:], "lr": 0.006, "weight_decay": 0.1}]
        )
        sync = torchext.attach(ddp, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
        losses = []
        for step in range(30):
            inputs, targets = batch(rank.rank, step)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.5, error_if_nonfinite=True)
            assert norm > 0
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.02 / 8, 0.006 / 8])
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
        sync.synchronize()
        equal_everywhere(ddp.module)
        sync.detach()


def check_closure(rank: Rank) -> None:
    trainer = Trainer(rank)
    optimizer = trainer.optimizer

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = trainer.loss(0)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(10)]
    assert losses[-1] < losses[0]
    trainer.sync.detach()


def check_period_and_state(rank: Rank) -> None:
    # The static schedule leaves nobody alone: every average that is due is one of two or more members.
    for order in ORDERS:
        options = {"generator": "static", "sync_period": 3, "order": order}
        trainer = Trainer(rank, **options)
        for steps in range(1, 12):
            trainer.step()
            trainer.sync.wait()
            stats = trainer.sync.stats()
            assert stats["averages"] == steps // 3 and stats["steps"] == steps, stats
        assert sum(stats["group_sizes"].values()) == 3
        state = trainer.sync.state_dict()
        assert state == {"version": 1, "steps": 11}
        weights = trainer.module.state_dict()
        trainer.sync.detach()

        resumed = Trainer(rank, **options)
        resumed.module.load_state_dict(weights)
        resumed.sync.load_state_dict(state)
        assert resumed.sync.state_dict() == state
        with pytest.raises(ValueError, match="version must be 1, got 2"):
            resumed.sync.load_state_dict({"version": 2, "steps": 0})
        resumed.step()  # the 12th
        resumed.sync.wait()
        assert resumed.sync.stats()["averages"] == 1
        resumed.sync.detach()


def check_state_dict_waits(rank: Rank) -> None:
    """A checkpoint between a step and the next forward holds the finished average, not half of it."""
    for generator in ("static", "smart"):
        trainer = Trainer(rank, generator=generator)
        for _ in range(5):
            trainer.step()
            saved = torch.cat([v.reshape(-1) for v in trainer.module.state_dict().values()]).clone()
            trainer.sync.wait()
            assert torch.equal(saved, flat(trainer.module))
        trainer.sync.detach()


def check_detach(rank: Rank) -> None:
    for order in ORDERS:
        trainer = Trainer(rank, order=order)
        trainer.run(5)
        trainer.sync.detach()
        trainer.sync.detach()
        steps = trainer.sync.stats()["steps"]
        before = flat(trainer.module)
        # Alone: no rank waits for another.
        if rank.rank != 2:
            losses = trainer.run(20 + 5 * rank.rank)
            assert sum(losses[-5:]) < sum(losses[:5])
            assert not torch.equal(before, flat(trainer.module))
        assert trainer.sync.stats()["steps"] == steps == 5
        dist.barrier()
        all_ = everywhere(flat(trainer.module))
        assert (all_[0] != all_[1]).any()
        for call in (trainer.sync.synchronize, trainer.sync.averaged().__enter__):
            with pytest.raises(RuntimeError, match=r"after detach\(\)"):
                call()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.trunk(inputs)


def check_ddp_modes(rank: Rank) -> None:
    modes = [
        (Branching, {"find_unused_parameters": True}),
        (mlp, {"static_graph": True}),
        (mlp, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        (mlp, {"broadcast_buffers": False}),
    ]
    for make, ddp in modes:
        trainer = Trainer(rank, model=make(), ddp=ddp)
        before = trainer.evaluate()
        trainer.run(30)
        assert trainer.evaluate() < 0.8 * before, ddp
        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        trainer.sync.detach()


def check_other_models(rank: Rank) -> None:
    torch.manual_seed(0)
    frozen = mlp()
    frozen[0].requires_grad_(False)
    tied = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    tied[2].weight = tied[0].weight
    strided = mlp()
    strided[2].weight = nn.Parameter(torch.rand(16, 16).t() / 4)
    for model in (frozen, tied, strided):
        trainer = Trainer(rank, model=model)
        kept = frozen[0].weight.detach().clone()
        trainer.run(20)
        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        torch.testing.assert_close(frozen[0].weight, kept) if model is frozen else None
        trainer.sync.detach()
    half = Trainer(rank, model=Quadratic().to(torch.bfloat16))
    for _ in range(4):
        half.optimizer.zero_grad()
        half.ddp(torch.ones(1000, dtype=torch.bfloat16)).backward()
        half.optimizer.step()
    half.sync.synchronize()
    equal_everywhere(half.module)
    half.sync.detach()


def check_two_models(rank: Rank) -> None:
    """Two attached models, in two groups and in one."""
    first = Trainer(rank, generator="static")
    second = Trainer(rank, generator="static", order="cta")
    third = DistributedDataParallel(mlp(), process_group=first.group)
    optimizer = torch.optim.SGD(third.parameters(), lr=0.1)
    sync = torchext.attach(third, optimizer)
    for step in range(10):
        first.step()
        second.step()
        optimizer.zero_grad()
        third(batch(rank.rank, step)[0]).sum().backward()
        optimizer.step()
    for one in (first.sync, second.sync, sync):
        one.synchronize()
    for module in (first.module, second.module, third.module):
        equal_everywhere(module)
    for one in (first.sync, second.sync, sync):
        one.detach()


CHECKS = [
    check_grad_scaler,
    check_schedules_groups_and_clipping,
    check_closure,
    check_period_and_state,
    check_state_dict_waits,
    check_detach,
    check_ddp_modes,
    check_other_models,
    check_two_models,
]


def body_checks(rank: Rank) -> int:
    rank.init()
    for check in CHECKS:
        rank.report(check.__name__)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(rank)
    return len(CHECKS)


def test_training_loops() -> None:
    assert run_ranks(body_checks, 4, deadline=120) == [len(CHECKS)] * 4


def body_alone(rank: Rank) -> dict[str, Any]:
    rank.init()
    trainer = Trainer(rank)
    before = trainer.evaluate()
    trainer.run(20)
    assert trainer.evaluate() < before
    trainer.sync.synchronize()
    stats = trainer.sync.stats()
    trainer.sync.detach()
    return stats


def test_a_world_of_one() -> None:
    (stats,) = run_ranks(body_alone, 1)
    assert stats["steps"] == 20 and stats["averages"] == 0 and stats["bytes_sent"] == 0


def body_compiled(rank: Rank, place: str) -> str:
    rank.init()
    module = mlp()
    try:
        compiled = torch.compile(module, backend="aot_eager")
    except RuntimeError as error:  # an interpreter that torch.compile does not support
        return f"skip: {error}"
    if place == "inside":
        trainer = Trainer(rank, model=compiled, generator="static")
    else:
        trainer = Trainer(rank, model=module, generator="static")
        trainer.ddp = torch.compile(trainer.ddp, backend="aot_eager")
    before = trainer.evaluate()
    trainer.run(20)
    assert trainer.sync.stats()["averages"] > 0
    assert trainer.evaluate() < 0.8 * before
    trainer.sync.synchronize()
    equal_everywhere(module)
    trainer.sync.detach()
    return ""


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_compiled(place: str) -> None:
    reasons = run_ranks(body_compiled, 2, place, deadline=100)
    if any(reasons):
        pytest.skip(reasons[0])
