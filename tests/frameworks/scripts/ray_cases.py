"""Twelve epochs with random pauses in two workers of Ray, which wait for each other outside of torch.distributed.

``ray_cases.py train=BACKENDS``: Ray Train, by ``TorchConfig(backend=...)``, or, with options, by torchext's own class.
``ray_cases.py actors=BACKENDS``: plain actors that make the call which TorchConfig makes. Their report waits for the
other's, as that of Ray Train does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from reporting import SHARDED, name_of, options_of, report

EPOCHS, STEPS = 12, 4
DEADLINE = 100.0


def loop(backend: str, wrap: Callable[[Any], Any], tell: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """What a user writes: a group is there, of a backend of torchext's or Gloo."""
    import torch
    import torch.distributed as dist
    from reporting import numbers, spread
    from torch import nn

    torch.set_num_threads(1)
    rank, pauses = dist.get_rank(), random.Random(100 + dist.get_rank())
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = None
    if dist.get_backend() != "gloo":
        import torchext

        sync = torchext.attach(model, optimizer)
    data = torch.Generator().manual_seed(rank)
    told = []
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            inputs = torch.randn(8, 6, generator=data)
            time.sleep(pauses.uniform(0.001, 0.03))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), inputs[:, :2].sin())
            loss.backward()
            optimizer.step()
        time.sleep(pauses.uniform(0.0, 0.05))
        told.append({"epoch": epoch, "loss": float(loss.detach())})
        with contextlib.nullcontext() if sync is None or epoch % 2 else sync.averaged():
            tell(told[-1])
    steps = None
    if sync is not None:
        sync.synchronize()
        steps = sync.stats()["steps"]
        sync.detach()
    same = spread(dict(model.named_parameters()))
    told.append({"model": numbers(model), "steps": steps, "spread": same, "backend": dist.get_backend()})
    tell(told[-1])
    return told


@ray.remote
class Meeting:
    """Where a report waits for the other worker's."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []

    async def come(self) -> None:
        event = asyncio.Event()
        self.waiting.append(event)
        if len(self.waiting) == 2:
            for each in self.waiting:
                each.set()
            self.waiting = []
        await event.wait()


@ray.remote
class Worker:
    def run(self, rank: int, backend: str, port: str, meeting: Any) -> list[dict[str, Any]]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group(
            backend=name_of(backend),
            init_method="env://",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
            pg_options=options_of(backend) if backend == SHARDED else None,
        )
        try:
            return loop(backend, DistributedDataParallel, lambda _: ray.get(meeting.come.remote()))
        finally:
            dist.destroy_process_group()


def with_actors(backends: list[str]) -> None:
    ports = os.environ["FREE_PORTS"].split(",")
    workers, meeting = [Worker.remote() for _ in range(2)], Meeting.remote()
    for backend, port in zip(backends, ports, strict=False):
        runs = [worker.run.remote(rank, backend, port, meeting) for rank, worker in enumerate(workers)]
        report(actors={backend: ray.get(runs, timeout=DEADLINE)})


def in_ray_train(settings: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import prepare_model

    told = loop(settings["backend"], prepare_model, ray.train.report)
    if ray.train.get_context().get_world_rank() == 0:  # Ray keeps what was reported beside a checkpoint alone
        Path(settings["file"]).write_text(json.dumps(told[-1]))


def with_ray_train(backends: list[str]) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    for backend in backends:
        file = Path(f"{backend}.json").absolute()
        made: Any = TorchConfig(backend=name_of(backend), timeout_s=60)
        if options_of(backend) is not None:
            from torchext.integrations.ray import TorchextConfig

            made = TorchextConfig(options_of(backend), timeout_s=60)
        trainer = TorchTrainer(
            in_ray_train,
            train_loop_config={"backend": backend, "file": str(file)},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=made,
            run_config=RunConfig(storage_path=str(file.parent), name=backend),
        )
        trainer.fit()
        report(train={backend: json.loads(file.read_text())})


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=True)
    for words in sys.argv[1:]:
        way, _, names = words.partition("=")
        {"actors": with_actors, "train": with_ray_train}[way](names.split(","))
    ray.shutdown()
