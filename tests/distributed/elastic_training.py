"""What the tests of ``on_peer_failure="continue"`` share: a training that goes on, and a worker that is gone for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attached import OPTIONS, batch, mlp
from harness import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import _C


class ElasticTraining:
    """A small regression, trained with on_peer_failure="continue"."""

    def __init__(
        self,
        rank: Rank,
        backend: str,
        options: dict[str, Any],
        *,
        workers: int | None = None,
        module: nn.Module | None = None,
        own_group: bool = False,
    ) -> None:
        """workers: the world at first; ranks from there on join it. own_group: the model's, beside the world."""
        pg_options = OPTIONS[backend](timeout=timedelta(seconds=60), **options)
        group = None
        if own_group:
            if not dist.is_initialized():
                rank.init("gloo", timeout=60)
            group = dist.new_group(backend=backend, pg_options=pg_options)
        elif workers is not None and rank.rank >= workers:
            torchext.join_running_job(backend, f"file://{rank.folder / 'store'}", pg_options=pg_options)
        else:
            rank.init(backend, timeout=60, pg_options=pg_options, world_size=workers)
        self.rank = rank.rank
        self.ddp = DistributedDataParallel(mlp() if module is None else module, process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02, momentum=0.5)
        self.sync = torchext.attach(self.ddp, self.optimizer, on_peer_failure="continue")
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            device = next(self.ddp.parameters()).device
            inputs, targets = (part.to(device) for part in batch(self.rank, self.step))
            self.optimizer.zero_grad()
            (self.ddp(inputs) - targets).square().mean().backward()
            self.optimizer.step()
            self.step += 1

    def meet_until(self, done: Callable[[dict[str, Any]], bool], steps: int = 3) -> None:
        """Meets the others every so many steps, until the stats are as wanted."""
        end = time.monotonic() + 40
        while not done(self.sync.stats()):
            assert time.monotonic() < end, self.sync.stats()
            self.train(steps)
            self.sync.synchronize()

    def grow_to(self, workers: int) -> None:
        self.meet_until(lambda stats: stats["workers"] == workers)

    @torch.no_grad()
    def validation_loss(self) -> float:
        inputs, targets = batch(rank=50, step=0, rows=1024)
        return float((self.ddp.module(inputs) - targets).square().mean())

    def workers(self) -> int:
        return int(self.sync.stats()["workers"])


def stop_when_connecting() -> None:
    """This process, at the next group: it has come like the others, which wait for its connections in vain."""
    _C.arm_fault_point("group.arrived", "stop")
