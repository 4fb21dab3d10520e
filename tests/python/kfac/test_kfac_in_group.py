"""K-FAC in a process group of one rank: no strategy changes anything, and what "dear" cannot step is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kfac_models import flat, mlp, train
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.optim import KFAC, PADKFAC, SPDKFAC, KFACPreconditioner

WAY = r"put KFACPreconditioner\(model, optimizer\) in front of .* DeAROptions\(form='replicated'\), or .* plain DDP"


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_alone(strategies: Sequence[str], **options: Any) -> list[int]:
    """Trains as without a group; how many directions each strategy has made of rows."""
    options |= {"lr": 0.1, "damping": 0.01, "inverse_update_steps": 3}
    plain = mlp()
    train(plain, KFAC(plain, **options | {"gather_rows": None}), 8)
    counts = []
    for strategy in strategies:
        for shared in (False, True):
            model = DistributedDataParallel(mlp())
            optimizer = KFAC(model, strategy=strategy, shared_memory=shared, **options)
            train(model, optimizer, 8)
            torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-9, msg=f"{strategy} {shared}")
            counts.append(optimizer.stats()["row_directions"])
    return counts


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_every_strategy_is_training_without_a_group(alone: None, path: bool, method: str) -> None:
    check_alone(("spd", "pad", "comm-opt", "mem-opt", "hybrid", "d-kfac", "auto", "dp"), method=method)


def test_directions_of_rows_are_training_without_a_group(alone: None) -> None:
    # Two layers in five steps.
    assert check_alone(("spd", "pad", "comm-opt", "hybrid", "auto"), gather_rows=True) == [10] * 10


def refused_by_dear(form: str) -> None:
    model = DistributedDataParallel(mlp())
    options = {"strategy": "spd", "inverse_update_steps": 2}
    error = TypeError if form == "replicated" else ValueError
    for kind in (SPDKFAC, PADKFAC):
        optimizer = kind(model)
        with pytest.raises(error, match=rf"^{kind.__name__} under dear.*{WAY}"):
            torchext.attach(model, optimizer)
        optimizer.kfac.remove()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    says = rf"^KFACPreconditioner under dear in the sharded form.*{WAY}"
    in_fronts = (plain, None) if form == "sharded" else ()
    for in_front in in_fronts:
        kfac = KFACPreconditioner(model, in_front, **options)
        with pytest.raises(ValueError, match=says):
            torchext.attach(model, plain)
        kfac.remove()
    sync = torchext.attach(model, plain)
    with pytest.raises(error, match=rf"^SPDKFAC under dear.*{WAY}"):  # attached first, which is no other thing
        SPDKFAC(model)
    for in_front in in_fronts:
        with pytest.raises(ValueError, match=says):
            KFACPreconditioner(model, in_front, **options)
    sync.detach()
    KFACPreconditioner(model, plain, **options).remove()


@pytest.mark.parametrize("form", ["replicated", "sharded"])
def test_what_dear_cannot_step_is_refused(form: str) -> None:
    options = torchext.DeAROptions(form=form, bucket_mb=0.001)
    dist.init_process_group("dear", store=HashStore(), rank=0, world_size=1, pg_options=options)
    try:
        refused_by_dear(form)
    finally:
        dist.destroy_process_group()
