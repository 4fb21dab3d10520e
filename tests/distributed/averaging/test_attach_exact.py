"""What attached models compute, against plain gradient descent and against statistics computed alone."""

from __future__ import annotations

import pytest
import torch
from attached import ORDERS, Normalized, Trainer, batch, equal_everywhere, everywhere, flat
from harness import Rank, run_ranks
from largest import largest
from torch import nn

pytestmark = pytest.mark.sanitize


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
                        worst = largest(worst, float((flat(module) - mean).abs().max()))
            trainer.sync.synchronize()
            worst = largest(worst, float((flat(trainer.module) - mean).abs().max()))
            trainer.sync.detach()
    return worst


def test_the_mean_follows_plain_gradient_descent() -> None:
    assert largest(run_ranks(body_quadratic, 4)) < 1e-12


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
