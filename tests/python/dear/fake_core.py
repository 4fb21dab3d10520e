"""What the parts of "dear" use of its C++ synchronizer, with averages that are there at once; and groups of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchext.ddp.under_way import set_own_gradient


class FakeCore:
    """Of a rank of so many, with averages by position."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        averages: dict[int, torch.Tensor] | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.parameters, self.averages, self.rank, self.size = parameters, averages or {}, rank, size
        self.calls: list[str] = []

    def stepped(self, position: int) -> torch.Tensor:
        return self.own_slice_of(position, self.parameters[position].detach())

    def own_slice_of(self, _: int, whole: torch.Tensor) -> torch.Tensor:
        each = -(-whole.numel() // self.size)
        return whole.view(-1)[each * self.rank : each * (self.rank + 1)]

    def own_gradient(self, position: int) -> torch.Tensor | None:
        return self.own_slice_of(position, self.averages[position]) if position in self.averages else None

    def settle_gradient(self, position: int) -> None:
        set_own_gradient(self.parameters[position], self.averages.get(position))

    def clear_gradients(self) -> None:
        self.calls.append("clear_gradients")

    def note_lost_change(self) -> None:
        self.calls.append("note_lost_change")


def on_two_ranks(body: Callable[[int, Any], Any]) -> list[Any]:
    """What body(rank, group) returns in a thread of each rank."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        return body(rank, dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)))

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))
