"""Plans whose choice is the test's and not the network's, and a model to train by them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Rank
from largest import largest
from torch import nn
from torch.nn.functional import mse_loss

from torchext import auto
from torchext.auto import Candidate, LinkModel, OperationTable, SyncPlan

ROWS = 4  # of every rank's batch
STEP_SECONDS = 0.01


class Net(nn.Module):
    """Has a layer that may be frozen, and one that no step reaches."""

    def __init__(self, *, frozen: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 20)
        self.third, self.head = nn.Linear(20, 12), nn.Linear(12, 3)
        self.never = nn.Linear(5, 5) if unused else None
        self.second.requires_grad_(not frozen)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.head(torch.tanh(self.third(hidden)))


def step(model: Any) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(ROWS, 16, dtype=dtype)).pow(2).mean().backward()


def local_link(ranks: int, backend: str = "gloo") -> LinkModel:
    """Of ranks on one host."""
    table = OperationTable(((4096, 1e-4), (65536, 1e-3)))
    return LinkModel(
        backend=backend,
        device="cpu",
        host_of=(0,) * ranks,
        tables=dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), table),
        latency_seconds=1e-4,
        bytes_per_second=1e8,
        copy_bytes_per_second=1e9,
        operations_per_second=1e10,
    )


def runs(count: int, ends: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Buckets of consecutive gradients; the last end may be left out."""
    limits = [0, *[end for end in ends if end < count], count]
    return tuple(tuple(range(begin, end)) for begin, end in itertools.pairwise(limits))


def candidate(way: str, form: str, buckets: tuple[tuple[int, ...], ...], **others: Any) -> Candidate:
    """One that is possible and not chosen."""
    fields: dict[str, Any] = {
        "partners": 0,
        "step_seconds": STEP_SECONDS,
        "compute_seconds": STEP_SECONDS,
        "exposed_seconds": 0.0,
        "extra_bytes": 0.0,
        "exact": True,
        "rho": 0.0,
        "possible": True,
        "chosen": False,
        "reason": "slower",
        "transport": "ring" if way == "dear" else "",
    }
    return Candidate(way=way, form=form, buckets=buckets, **fields | others)


def plan_for(
    model: nn.Module,
    way: str,
    form: str,
    *,
    ranks: int,
    ends: Sequence[int] = (2, 3, 6),
    backend: str = "gloo",
    **others: Any,
) -> SyncPlan:
    """A plan that has chosen this way, with buckets that end there. Collective: the model is profiled."""
    profile = auto.profile(model, step, steps=1)
    profile = dataclasses.replace(profile, step_seconds=((STEP_SECONDS,),) * ranks)
    buckets = runs(len(profile.parameters), ends)
    found = [candidate("ddp", "default", buckets)]
    if (way, form) != ("ddp", "default"):
        found.append(candidate(way, form, () if others else buckets, **others))
    found[-1] = dataclasses.replace(found[-1], chosen=True, reason="chosen")
    return SyncPlan(profile, local_link(ranks, backend), tuple(found), ("exact",), str(torch.__version__), "0.2.0")


def bucket_bytes(plan: SyncPlan) -> list[int]:
    """Of the chosen buckets."""
    assert plan.chosen is not None
    return [sum(plan.profile.parameters[at].nbytes for at in bucket) for bucket in plan.chosen.buckets]


class Beside:
    """One model trained by a plan on all ranks, and its twin by this process alone, on the whole batch."""

    def __init__(
        self, rank: Rank, model: nn.Module, plan: SyncPlan, optimizer: Callable[[Any], Any], **ddp: Any
    ) -> None:
        self.rank, self.twin, self.steps = rank, copy.deepcopy(model), 0
        self.model, self.optimizer = model, optimizer(model.parameters())
        self.twin_optimizer = optimizer(self.twin.parameters())
        self.ddp, self.sync = plan.apply(model, self.optimizer, **ddp)

    def backward(self, part: int = 0) -> None:
        generator = torch.Generator().manual_seed(10 * self.steps + part)
        inputs = torch.rand(ROWS * self.rank.size, 16, generator=generator) * 2 - 1
        targets = inputs[:, :3].sin()
        own = slice(self.rank.rank, None, self.rank.size)
        mse_loss(self.ddp(inputs[own]), targets[own]).backward()
        mse_loss(self.twin(inputs), targets).backward()

    def run(self, steps: int, *, accumulate: bool = False) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.twin_optimizer.zero_grad()
            if accumulate:
                with self.ddp.no_sync():
                    self.backward(part=1)
            self.backward()
            self.optimizer.step()
            self.twin_optimizer.step()
            self.steps += 1

    def apart(self) -> float:
        """The largest difference of a parameter, relative to how large these are."""
        self.sync.synchronize()
        return self.apart_now()

    def apart_now(self) -> float:
        """The same, of a model that is detached, too."""
        return largest(
            float(((a - b).abs().max() / b.abs().max().clamp(min=0.1)).detach())
            for a, b in zip(self.model.parameters(), self.twin.parameters(), strict=True)
        )
