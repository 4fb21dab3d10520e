"""Scripts that are run twice in one process: on plain DDP over Gloo, and attached. With two ranks both are the same.

With SGD the mean of two workers' parameters after a step of each is what DDP has: ``static`` groups of two, a ring of
two, groups of both.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attached import OPTIONS
from harness import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

ATTACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "prague": ("prague", {"generator": "static", "order": "atc"}),
    "dssync": ("dssync", {"order": "atc"}),
    "hop": ("hop", {"order": "serial", "graph": "ring"}),
    "dear-sharded": ("dear", {"allreduce_fallback": False, "form": "sharded", "bucket_mb": 0.001}),
    "dear-replicated": ("dear", {"allreduce_fallback": False, "bucket_mb": 0.001, "form": "replicated"}),
    "dear": ("dear", {}),
}
DEAR = [name for name in ATTACHED if name.startswith("dear")]


class Script:
    """What a script has: a wrapped model, its optimizer, and the synchronizer, which plain DDP has none of."""

    def __init__(self, rank: Rank, form: str | None) -> None:
        self.rank = rank.rank
        self.generator = torch.Generator().manual_seed(rank.rank)
        limit = timedelta(seconds=30)
        if form is None:
            self.group = dist.new_group(backend="gloo", timeout=limit)
        else:
            backend, options = ATTACHED[form]
            self.group = dist.new_group(backend=backend, timeout=limit, pg_options=OPTIONS[backend](**options))
        self.attached = form is not None
        self.sync: Any = None
        self.ddp: Any = None

    def wrap(self, module: nn.Module, **ddp: Any) -> DistributedDataParallel:
        self.ddp = DistributedDataParallel(module, process_group=self.group, **ddp)
        return self.ddp

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        if self.attached:
            self.sync = torchext.attach(self.ddp, optimizer)

    def inputs(self, columns: int = 16, rows: int = 5) -> torch.Tensor:
        """Of this rank, the next ones."""
        return torch.randn(rows, columns, generator=self.generator)

    def result(self) -> torch.Tensor:
        """The parameters, when nothing is under way any more."""
        if self.sync is not None:
            self.sync.synchronize()
        found = torch.cat([parameter.detach().flatten() for parameter in self.ddp.module.parameters()])
        if self.sync is not None:
            self.sync.detach()
        return found


def apart(rank: Rank, form: str, script: Callable[..., torch.Tensor], *args: Any) -> float:
    """The largest difference between an attached run of a script and one on plain DDP, and between the ranks."""
    rank.init("gloo")
    found = []
    for kind in (None, form):
        torch.manual_seed(0)
        found.append(script(Script(rank, kind), *args))
    other = [torch.empty_like(found[1]) for _ in range(rank.size)]
    dist.all_gather(other, found[1])
    return max(float((found[0] - found[1]).abs().max()), float((other[0] - other[1]).abs().max()))


def wide() -> nn.Sequential:
    """Large enough that parameters are still on their way when the next line reads them."""
    return nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 4))


def loss(script: Script) -> torch.Tensor:
    """Of the next inputs."""
    return (script.ddp(script.inputs()) - 1).square().mean()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
