"""What "hop" refuses by what one rank sees, and a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Rank
from hop_reference import Trainer
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import torchext


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("hop", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_models_that_are_refused(group: None) -> None:
    synced = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    synced.module[1] = nn.SyncBatchNorm(4)  # later, as DDP takes none on a CPU
    with pytest.raises(ValueError, match=r"'1' is a SyncBatchNorm.*Use BatchNorm"):
        torchext.attach(synced, sgd(synced))
    plain = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"bucket_mb must be 'auto' with hop, which sends whole models, got 2"):
        torchext.attach(plain, sgd(plain), bucket_mb=2)
    assert torchext.backend_of().failure == (-1, "")


def test_a_world_of_one(group: None, tmp_path: Path) -> None:
    trainer = Trainer(Rank(0, 1, tmp_path, None))  # type: ignore[arg-type]
    losses = trainer.run(20)
    assert sum(losses[-5:]) < sum(losses[:5])
    with trainer.sync.averaged():
        pass
    trainer.sync.synchronize()
    trainer.sync.detach()
    stats = trainer.sync.stats()
    assert stats["steps"] == 20 and stats["averages"] == 0 and stats["bytes_sent"] == 0
