"""What a newcomer gets of the first worker: all that the model and the optimizer have, or it goes again."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, mlp
from case_choice import slow_on
from elastic_training import ElasticTraining
from harness import Rank, launch
from rows import row, row_values
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize


class Peculiar(torch.nn.Module):
    """Has more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.extra = 0
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("none", None, persistent=False)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def body_peculiar(rank: Rank) -> Any:
    if rank.rank == 2:
        rank.pause()
    module = Peculiar()
    training = ElasticTraining(rank, "prague", {}, workers=2, module=module)
    group = training.optimizer.param_groups[0]
    if rank.rank < 2:
        module.extra = 7
        module.seen.fill_(3)
        module.count.fill_(4)
        group["lr"], group["betas"] = np.float64(0.03), (np.float32(0.5), 0.9)  # a schedule's
        rank.report("trains")
    training.grow_to(3)
    return module.extra, module.seen.tolist(), int(module.count), group["lr"], group["betas"]


def test_a_newcomer_gets_all_that_a_model_has() -> None:
    with launch(body_peculiar, 3) as ranks:
        ranks.expect("trains", [0, 1])
        ranks.proceed([2])
        assert ranks.values() == [(7, [3, 3], 4, 0.03, (0.5, 0.9))] * 3


class Choosy(Peculiar):
    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("not this one")


def body_choosy(rank: Rank, workers: int, extra: Any, match: str) -> Any:
    if rank.rank == workers:
        torchext.join_running_job("prague", f"file://{rank.folder / 'store'}")
        ddp = DistributedDataParallel(Choosy())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=match):
            torchext.attach(ddp, optimizer, on_peer_failure="continue")
        assert not dist.is_initialized()
        return 0
    module = Peculiar()
    module.extra = (_ for _ in ()) if extra == "a generator" else extra
    training = ElasticTraining(rank, "prague", {}, workers=workers, module=module)
    training.meet_until(lambda stats: bool(stats["lost_ranks"]), steps=0)
    training.train(10)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["workers"], stats["lost_ranks"]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_newcomer_that_cannot_take_over_goes_and_the_job_goes_on(workers: int) -> None:
    unsaved = r"RuntimeError: that worker could not save it: TypeError: cannot pickle 'generator' object"
    rows = {
        "refuses": (7, r"cannot load what .* sent \(RuntimeError: not this one\); make model and optimizer as"),
        "a function": (print, r"\(UnpicklingError: Weights only load failed"),
        "a generator": ("a generator", unsaved),
    }
    rows_of = {name: (workers, *values) for name, values in rows.items()}
    for name, values in row_values(body_choosy, workers + 1, rows_of).items():
        with row(name):
            assert values[:workers] == [(workers, [workers])] * workers


def body_two(rank: Rank, backend: str, first: int) -> Any:
    """Both are let in at once; one cannot take over, while the other makes what synchronizes its model."""
    asked = rank.folder / "asked"
    if rank.rank not in (0, first):
        while not asked.exists():
            time.sleep(0.01)
    if rank.rank == 2:
        torchext.join_running_job(backend, f"file://{rank.folder / 'store'}")
        ddp = DistributedDataParallel(Choosy())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="not this one"):
            torchext.attach(ddp, optimizer, on_peer_failure="continue")
        return None
    training = ElasticTraining(rank, backend, {}, workers=1, module=Peculiar())
    if rank.rank == 0:
        store = training.sync._recovery.membership._admission._store  # type: ignore[attr-defined]
        while not store.check(["1/request"]):
            time.sleep(0.01)
        asked.touch()
        while not store.check(["2/request"]):
            time.sleep(0.05)
    training.meet_until(lambda stats: stats["workers"] == 2 and len(stats["lost_ranks"]) == 1)
    training.train(5)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["workers"], len(stats["lost_ranks"]), training.sync.state_dict()["steps"]


@pytest.mark.parametrize(("backend", "first"), slow_on([("prague", 1), ("dssync", 2), ("hop", 2)], "dssync"))
def test_a_newcomer_goes_on_without_another(backend: str, first: int) -> None:
    with launch(body_two, 3, backend, first) as ranks:
        (workers, lost, steps), other, _ = ranks.values()
    assert (workers, lost) == (2, 1)
    assert other == (2, 1, steps)
