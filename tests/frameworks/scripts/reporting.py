"""What the scripts of these tests share: small models, their numbers as text, the lines that tests read."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SHARDED = "dear sharded"


def report(**cases: Any) -> None:
    """A line that the test reads."""
    print("RESULT", json.dumps(cases), flush=True)


def begin(backend: str, *, initialize: bool) -> None:
    """The rendezvous of the next group is another; the group itself is made here, or by the framework."""
    ports = os.environ["FREE_PORTS"].split(",")
    os.environ["MASTER_PORT"], os.environ["FREE_PORTS"] = ports[0], ",".join(ports[1:])
    if initialize or backend in ("prague", "dssync", SHARDED):
        dist.init_process_group(name_of(backend), pg_options=options_of(backend))


def name_of(backend: str) -> str:
    """What torch knows it by."""
    return backend.partition(" ")[0]


def options_of(backend: str) -> Any:
    """Options that the tests want; None: the defaults."""
    if backend not in ("prague", "dssync", SHARDED):
        return None
    import torchext

    if backend == SHARDED:
        # Without the first steps by plain all-reduce, in which nothing is in slices.
        return torchext.DeAROptions(form="sharded", allreduce_fallback=False)
    kinds = {"prague": torchext.PragueOptions, "dssync": torchext.DSSyncOptions}
    return kinds[backend](sync_period=5)  # else two workers would be the same after each step


def numbers(module: nn.Module) -> list[float]:
    """A model's parameters, a few figures each."""
    return [
        float(f) for p in module.parameters() for f in (p.detach().double().sum(), p.detach().double().square().sum())
    ]


def is_average(saved: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> float:
    """How far what was saved is from the average of all workers' own; collective."""
    apart = [torch.zeros((), dtype=torch.float64)]
    for name, value in own.items():
        mean = value.detach().double().clone()
        dist.all_reduce(mean)
        apart.append((saved[name].double() - mean / dist.get_world_size()).abs().max())
    return float(torch.stack(apart).max())  # NaN if one is


def spread(own: dict[str, torch.Tensor]) -> float:
    """How far the workers' models are from each other; collective."""
    apart = [torch.zeros((), dtype=torch.float64)]
    for value in own.values():
        low, high = value.detach().double().clone(), value.detach().double().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        apart.append((high - low).max())
    return float(torch.stack(apart).max())
