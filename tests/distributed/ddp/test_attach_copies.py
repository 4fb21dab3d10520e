"""Copies and pickles of an attached model are models as any other: nobody averages them."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from attached import OPTIONS, Trainer, batch, equal_everywhere, flat
from beside_ddp import ATTACHED
from harness import Rank
from rows import row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import torchext


def saved_and_loaded(ddp: DistributedDataParallel) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def body_copies(rank: Rank, form: str) -> None:
    backend, options = ATTACHED[form]
    rank.init(backend, pg_options=OPTIONS[backend](**options))
    trainer = Trainer(rank, group=dist.group.WORLD)  # DDP copies no model of another group
    for steps in (0, 3):  # before and after the first forward, which puts hooks in their places
        trainer.run(steps)
        trainer.sync.wait()
        values = flat(trainer.module)
        for make in (copy.deepcopy, saved_and_loaded, lambda ddp: AveragedModel(ddp).module):
            other = make(trainer.ddp)
            assert torch.equal(flat(other.module), values)
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            for step in range(2):
                inputs, targets = batch(rank.rank, step)
                optimizer.zero_grad()
                nn.functional.mse_loss(other(inputs), targets).backward()
                optimizer.step()
            assert not torch.equal(flat(other.module), values) and torch.equal(flat(trainer.module), values)
    assert copy.deepcopy(trainer.sync) is None and saved_and_loaded(trainer.sync) is None  # its docstring says so
    # A copy of one model may be attached, too.
    twin = copy.deepcopy(trainer.ddp)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    sync = torchext.attach(twin, optimizer)
    nn.functional.mse_loss(twin(batch(rank.rank, 0)[0]), batch(rank.rank, 0)[1]).backward()
    optimizer.step()
    sync.synchronize()
    equal_everywhere(twin.module)
    assert sync.stats()["steps"] == 1
    sync.detach()
    trainer.run(2)
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()


def test_copies_are_not_attached() -> None:
    row_values(body_copies, 2, {form: (form,) for form in ATTACHED})
