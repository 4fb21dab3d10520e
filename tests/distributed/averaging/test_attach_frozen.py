"""Frozen parameters of attached models: they do not travel in training, and are averaged where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import Trainer, equal_everywhere, everywhere, new_group
from case_choice import slow_on
from harness import Rank, elapsed_error, run_ranks
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
each_backend = pytest.mark.parametrize(
    ("backend", "options"), slow_on(BACKENDS, "dssync"), ids=lambda value: str(value)
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


def body_bytes(rank: Rank, backend: str, options: dict[str, Any]) -> tuple[int, int]:
    rank.init()
    trainer = Trainer(rank, model=WithBackbone(), backend=backend, lr=0.01, **options)
    trainer.run(6)
    stats = trainer.sync.stats()
    trainer.sync.detach()
    return stats["bytes_sent"] + stats.get("bytes_shared", 0), stats.get("bucket_bytes", 0)


@each_backend
def test_only_what_is_trained_travels(backend: str, options: dict[str, Any]) -> None:
    head = 4 * 401
    for sent, buckets in run_ranks(body_bytes, 2, backend, options):
        assert 0 < sent <= 7 * (head + 128), (sent, head)  # messages have headers, and hop is one ahead
        assert buckets in (0, head)


def body_bits(rank: Rank, backend: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    rank.init()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each_backend
def test_what_is_frozen_stays_to_the_bit(backend: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    run_ranks(body_bits, 3, backend, options, dtype)


def body_16_bits(rank: Rank) -> None:
    """Parameters that are the same everywhere come out as they went in, trained ones too, in any number of ranks."""
    rank.init()
    trainer = Trainer(rank, model=nn.Linear(300, 3).to(torch.bfloat16), backend="prague")
    before = trainer.module.weight.detach().clone()
    trainer.sync.synchronize()
    assert torch.equal(trainer.module.weight, before)
    trainer.sync.detach()


def test_equal_16_bit_parameters_stay_to_the_bit() -> None:
    run_ranks(body_16_bits, 3)


def body_teacher(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    rank.init()
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


@each_backend
def test_a_teacher_is_averaged_where_workers_meet(backend: str, options: dict[str, Any]) -> None:
    run_ranks(body_teacher, 2, backend, options)


def body_unfrozen(rank: Rank, backend: str) -> tuple[str, str, float]:
    rank.init()
    trainer = Trainer(rank, model=WithBackbone(), backend=backend, ddp={"find_unused_parameters": True})
    trainer.run(2)
    trainer.sync.wait()
    for frozen in (True, False):  # what was trained at attach may pause
        trainer.module.head.bias.requires_grad_(not frozen)
        trainer.run(1)
    trainer.sync.wait()
    trainer.module.body.weight.requires_grad_(True)
    error = elapsed_error(trainer.step)
    trainer.module.body.weight.requires_grad_(False)
    trainer.sync.detach()
    return error


@pytest.mark.parametrize("backend", ["prague", "dssync", "hop", "dear"])
def test_unfreezing_after_attach(backend: str) -> None:
    for kind, text, _ in run_ranks(body_unfrozen, 2, backend):
        assert kind == "ValueError"
        assert "body.weight was frozen at torchext.attach and requires a gradient now" in text, text


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
