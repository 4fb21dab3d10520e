"""Frozen parameters of attached models: they do not travel in training, and are averaged where they differ."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import Trainer, equal_everywhere, everywhere, new_group
from harness import Rank, elapsed_error, run_ranks
from rows import row
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

BACKENDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("prague", {"order": "cta", "generator": "static"}),
    ("prague", {"order": "atc", "generator": "static"}),
    ("dssync", {}),
    ("hop", {"graph": "ring"}),
    ("hop", {"graph": "ring", "order": "serial"}),
)


class WithBackbone(nn.Module):
    """A frozen body, far larger than the head that is trained, and a teacher of the head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 400).to(dtype).requires_grad_(False)
        self.head = nn.Linear(400, 1)
        self.teacher = nn.Linear(400, 1).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs.to(self.body.weight.dtype)).float()))  # type: ignore[no-any-return]


def check_bytes(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    trainer = Trainer(rank, model=WithBackbone(), backend=backend, lr=0.01, **options)
    trainer.run(6)
    stats = trainer.sync.stats()
    trainer.sync.detach()
    head = 4 * 401
    sent = stats["bytes_sent"] + stats.get("bytes_shared", 0)
    assert 0 < sent <= 7 * (head + 128), (sent, head)  # messages have headers, and hop is one ahead
    assert stats.get("bucket_bytes", 0) in (0, head), stats


def body_bytes(rank: Rank) -> None:
    rank.init()
    for backend, options in BACKENDS:
        with row(backend, options):
            check_bytes(rank, backend, options)


def test_only_what_is_trained_travels() -> None:
    run_ranks(body_bytes, 2)


def check_bits(rank: Rank, backend: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    trainer = Trainer(rank, model=WithBackbone(dtype), backend=backend, lr=0.01, **options)
    before = {name: value.clone() for name, value in trainer.module.body.state_dict().items()}
    for _ in range(2):
        trainer.run(3)
        with trainer.sync.averaged() as module:
            for name, value in module.body.state_dict().items():
                assert torch.equal(value, before[name]), name
        trainer.sync.synchronize()
        for name, value in trainer.module.body.state_dict().items():
            assert torch.equal(value, before[name]), name
    equal_everywhere(trainer.module)
    trainer.sync.detach()


def check_16_bits(rank: Rank) -> None:
    """Parameters that are the same everywhere come out as they went in, trained ones too, in any number of ranks."""
    trainer = Trainer(rank, model=nn.Linear(300, 3).to(torch.bfloat16), backend="prague")
    before = trainer.module.weight.detach().clone()
    trainer.sync.synchronize()
    assert torch.equal(trainer.module.weight, before)
    trainer.sync.detach()


def body_bits(rank: Rank) -> None:
    rank.init()
    for (backend, options), dtype in itertools.product(BACKENDS, (torch.bfloat16, torch.float32, torch.float64)):
        with row(backend, options, dtype):
            check_bits(rank, backend, options, dtype)
    with row("trained, of 16 bits"):
        check_16_bits(rank)


def test_what_is_the_same_stays_to_the_bit() -> None:
    run_ranks(body_bits, 3)


def check_teacher(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    trainer = Trainer(rank, model=WithBackbone(), backend=backend, lr=0.01, **options)
    module: Any = trainer.module
    for _ in range(4):
        trainer.step()
        trainer.sync.wait()
        for mine, students in zip(module.teacher.parameters(), module.head.parameters(), strict=True):
            mine.data.lerp_(students.detach() + rank.rank, 0.5)  # past autograd's versions
    local = module.teacher.weight.clone()
    mean = everywhere(local).double().mean(0).float()
    assert not torch.equal(local, mean)
    with trainer.sync.averaged():
        torch.testing.assert_close(module.teacher.weight, mean, rtol=0, atol=1e-7)
    assert torch.equal(module.teacher.weight, local)
    trainer.sync.synchronize()
    torch.testing.assert_close(module.teacher.weight, mean, rtol=0, atol=1e-7)
    equal_everywhere(module)
    trainer.sync.detach()


def body_teacher(rank: Rank) -> None:
    rank.init()
    for backend, options in BACKENDS:
        with row(backend, options):
            check_teacher(rank, backend, options)


def test_a_teacher_is_averaged_where_workers_meet() -> None:
    run_ranks(body_teacher, 2)


def body_frozen_here_only(rank: Rank) -> tuple[str, str, float]:
    rank.init()
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(rank.rank != 1)
    ddp = DistributedDataParallel(model, process_group=new_group("prague"), init_sync=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    error = elapsed_error(lambda: torchext.attach(ddp, optimizer))
    dist.barrier()
    return error


def test_frozen_on_one_rank_only() -> None:
    for kind, text, _ in run_ranks(body_frozen_here_only, 2):
        assert kind == "DistBackendError"
        assert "the number of parameters is 2 on rank 0 and 1 on rank 1" in text, text
