"""Training by "dear" is single-process training by every transport, wherever the ranks are."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from pretended_hosts import be_on_host, needs_root
from rows import values_in_one_group
from sharded import FORMS, Pair, check_within, each_in_ways, made, sgd
from torch import nn

import torchext

PLACES = {
    "in order": (0, 0, 1, 1),
    "interleaved": (0, 1, 0, 1),
    "of unequal size": (0, 0, 0, 1),
    "one": (0, 0, 0, 0),
}


def deep() -> nn.Module:
    """Buckets that go along the grid, and small ones that go directly."""
    return nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Damped: of many weights the gradients are but rounding, and would make steps of their own."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=0.03)


def body_trains(rank: Rank) -> dict[str, float]:
    found = {}
    for (name, hosts), optimizer, bucket_mb in itertools.product(PLACES.items(), (sgd, adamw), (0.1, 1.0)):
        be_on_host(hosts[rank.rank])
        pair = Pair(rank, made(deep), optimizer, bucket_mb=bucket_mb)
        assert torchext._C.hosts_of(pair.group, torch.device("cpu")) == list(hosts), name
        found[f"{name}, {optimizer.__name__}, {bucket_mb} MiB"] = pair.run(3).done()
    return found


@needs_root
def test_over_rooms() -> None:
    ways = [f"{form} over hierarchical" for form in FORMS]
    for worst in run_ranks(each_in_ways, 4, [body_trains], ways, deadline=120):
        check_within(worst)


def attach(**options: Any) -> torchext.DearSynchronizer:
    group = dist.new_group(backend="dear", pg_options=torchext.DeAROptions(**options))
    model = nn.parallel.DistributedDataParallel(made(deep), process_group=group)
    synchronizer = torchext.attach(model, sgd(model.parameters()))
    assert isinstance(synchronizer, torchext.DearSynchronizer)
    return synchronizer


def differs(rank: Rank) -> None:
    with pytest.raises(dist.DistBackendError, match="transport hierarchical is False on rank 0 and True on rank 1"):
        attach(transport=("auto", "hierarchical")[rank.rank])


def dedicated_options(_: Rank) -> tuple[timedelta, str, timedelta]:
    limit = timedelta(seconds=20)
    synchronizer = attach(
        transport="collectives", heartbeat_timeout=timedelta(0), call_check="every", operation_timeout=limit
    )
    options = torchext.backend_of(synchronizer._dedicated_group._group).options
    synchronizer.detach()
    return options.heartbeat_timeout, options.call_check, options.operation_timeout


def test_ranks_that_differ_learn_of_it_and_the_group_beside_goes_by_the_same_options() -> None:
    calls = {"options": (dedicated_options,), "differs": (differs,)}
    assert values_in_one_group(calls, 2)["options"] == [(timedelta(0), "every", timedelta(seconds=20))] * 2
