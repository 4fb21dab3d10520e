"""A DDP model on one of torchext's groups that nothing has attached trains as plain DDP, and rank 0 says so."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from attached import at_once, batch, flat, mlp
from harness import Rank
from rows import row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext


def steps(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> list[str]:
    """What was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(count):
            inputs, targets = batch(rank.rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if "torchext.attach" in str(warning.message)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def body(rank: Rank, backend: str, case: str) -> Any:
    rank.init(backend, pg_options=at_once(backend))
    if case == "attached":
        model = DistributedDataParallel(mlp())
        optimizer = sgd(model)
        sync = torchext.attach(model, optimizer)
        told = steps(rank, model, optimizer)
        sync.detach()
        return told
    if case == "only collectives":
        dist.all_reduce(torch.ones(3))
        alone = mlp()
        told = steps(rank, alone, sgd(alone))
        model = DistributedDataParallel(mlp(), process_group=dist.new_group(backend="gloo"))
        return told + steps(rank, model, sgd(model))
    if case == "later":  # something else trains first, and a model is there whose group has ended
        gloo = dist.new_group(backend="gloo")
        ended = DistributedDataParallel(mlp(), process_group=gloo)
        assert not steps(rank, ended, sgd(ended), 1)
        dist.destroy_process_group(gloo)
        alone = mlp()
        assert not steps(rank, alone, sgd(alone))
    model = DistributedDataParallel(mlp())
    told = steps(rank, model, sgd(model)) + steps(rank, model, sgd(model))
    plain = DistributedDataParallel(mlp(), process_group=dist.new_group(backend="gloo"))
    steps(rank, plain, sgd(plain)), steps(rank, plain, sgd(plain))
    assert torch.equal(flat(model), flat(plain))  # as it says
    return told


def test_who_is_told() -> None:
    cases = ["not attached", "later", "attached", "only collectives"]
    rows = {", ".join(row): row for row in itertools.product(["prague", "dssync", "hop", "dear"], cases)}
    # A process is told once: each row has its own.
    for row, (told, other) in row_values(body, 2, rows, victims={0, 1}).items():
        backend, case = rows[row]
        assert not other, row
        assert len(told) == (case in ("not attached", "later")), (row, told)
        assert all(f"backend '{backend}'" in text and "sync = torchext.attach" in text for text in told), (row, told)
