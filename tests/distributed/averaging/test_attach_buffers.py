"""Buffers that are no statistics - masks, constants, the largest numbers - in models that are averaged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import Normalized, Trainer, batch, everywhere
from harness import Rank, run_ranks
from rows import row
from torch import nn

pytestmark = pytest.mark.sanitize

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {"order": "cta", "generator": "static"}),
    ("prague", {"order": "atc", "generator": "static"}),
    ("dssync", {"order": "cta"}),
    ("dssync", {"order": "atc"}),
    ("hop", {"order": "parallel"}),
    ("hop", {"order": "serial"}),
]


def constants(dtype: torch.dtype) -> torch.Tensor:
    limits = torch.finfo(dtype)
    # Sums of three, or of their thirds, round.
    odd = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    values = [math.inf, -math.inf, math.nan, limits.max, limits.min, limits.tiny, 0.0, 0.1, 1 / 3]
    return torch.cat([torch.tensor(values, dtype=dtype), odd])


class Masked(nn.Module):
    """Buffers that never change, one that is written in every forward, and a statistic of the worker's own data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("rewritten", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("least", torch.full((3,), math.inf))
        self.register_buffer("seen", torch.zeros(1))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            self.register_buffer(f"of_{dtype}".replace("torch.", ""), constants(dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.rewritten.fill_(-math.inf).triu_(1)
        self.least.fill_(5.0)  # the first average but one may still be of the infinite ones
        self.seen += 1
        return self.head(inputs)


def check_kept(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    trainer = Trainer(rank, model=Masked(), backend=backend, **options)
    expected = {name: buffer.clone() for name, buffer in Masked().named_buffers()}

    def check(steps: int) -> None:
        expected["least"].fill_(5.0)
        expected["seen"].fill_(steps)
        for name, buffer in trainer.module.named_buffers():
            torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0, equal_nan=True, msg=name)

    for steps in range(1, 6):
        trainer.step()
        trainer.sync.wait()
        check(steps)
    with trainer.sync.averaged():
        check(5)
    check(5)
    trainer.run(2)
    trainer.sync.synchronize()
    check(7)
    # What differs is averaged, the same everywhere.
    trainer.module.seen.fill_(float(rank.rank))
    trainer.module.of_float32.fill_(torch.finfo(torch.float32).max / (1 + rank.rank))
    trainer.sync.synchronize()
    assert trainer.module.seen.item() == 1.0
    largest = everywhere(trainer.module.of_float32)
    assert largest.isfinite().all() and (largest == largest[0]).all()
    torch.testing.assert_close(largest[0, 0].item(), torch.finfo(torch.float32).max * (11 / 18), rtol=1e-6, atol=0)
    trainer.sync.detach()


def check_in_between(rank: Rank) -> None:
    """Averages that collectives of the script bring forward."""
    trainer = Trainer(rank, model=Masked())
    expected = dict(Masked().named_buffers())
    for _ in range(8):
        trainer.step()
        dist.all_reduce(torch.zeros(1))
        for name, buffer in trainer.module.named_buffers():
            if name not in ("seen", "least"):
                torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0, equal_nan=True, msg=name)
    trainer.sync.detach()


def body_kept(rank: Rank) -> None:
    rank.init()
    for backend, options in VARIANTS:
        with row(backend, options):
            check_kept(rank, backend, options)
    with row("collectives in between"):
        check_in_between(rank)


def test_constant_and_infinite_buffers_stay() -> None:
    run_ranks(body_kept, 3, deadline=120)


def check_variance(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    """Several passes a step, as in accumulation, and one worker with a batch that stands out."""
    trainer = Trainer(rank, model=Normalized(), lr=0.001, backend=backend, **options)
    least = []
    for step in range(6):
        trainer.optimizer.zero_grad()
        for part in range(8):
            inputs, targets = batch(rank.rank, 8 * step + part)
            scale = 100 if rank.rank == 0 and step == 2 else 1
            nn.functional.mse_loss(trainer.ddp(inputs * scale), targets).backward()
        trainer.optimizer.step()
        trainer.sync.wait()
        least.append(float(trainer.module.norm.running_var.min()))
    with trainer.sync.averaged() as module, torch.no_grad():
        assert module.eval()(batch(9, 0)[0]).isfinite().all()
    trainer.sync.detach()
    assert all(variance > 0 for variance in least), least


def body_variance(rank: Rank) -> None:
    rank.init()
    for backend, options in VARIANTS:
        with row(backend, options):
            check_variance(rank, backend, options)


def test_a_variance_never_becomes_negative() -> None:
    """What passes took off it meanwhile may be more than the mean is."""
    run_ranks(body_variance, 2, deadline=120)


class Assigned(nn.Module):
    """A buffer that every forward pass replaces, as DDP allows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = 0.5 * self.seen + inputs.mean().detach().abs() + dist.get_rank()
        return self.head(inputs)


def check_assigned(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    """The buffer is assigned wherever a forward pass may be: for the step, inside of it, and before a meeting."""
    model = Assigned()

    def forward(*_: Any) -> None:
        with torch.no_grad():
            model(torch.ones(2, 8))

    def evaluating(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr)
        optimizer.register_step_post_hook(forward)
        return optimizer

    trainer = Trainer(rank, model=model, optimizer=evaluating, backend=backend, **options)
    for _ in range(3):
        trainer.run(3)
        trainer.sync.wait()
        first, second = everywhere(model.seen.clone())
        # 0, or where an average comes with the next step about 1.2; without averages about 2.
        assert (second - first).abs().max() < 1.6, (first, second)
        forward()
        trainer.sync.synchronize()
        first, second = everywhere(model.seen.clone())
        assert torch.equal(first, second) and first.min() > 0
        trainer.run(1)
        forward()
        with trainer.sync.averaged():
            first, second = everywhere(model.seen.clone())
            assert torch.equal(first, second) and first.min() > 0
        own = model.seen.clone()
        with trainer.sync.averaged():
            forward()
        assert torch.equal(model.seen, own)
    trainer.sync.detach()


def body_assigned(rank: Rank) -> None:
    rank.init()
    for backend, options in VARIANTS:
        with row(backend, options):
            check_assigned(rank, backend, options)


def test_a_buffer_that_is_assigned_anew_is_averaged() -> None:
    run_ranks(body_assigned, 2, deadline=120)
