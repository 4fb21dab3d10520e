"""Scripts that are run twice in one process: on plain DDP over Gloo, and attached. With two ranks both are the same.

With SGD the mean of two workers' parameters after a step of each is what DDP has: ``static`` groups of two, a ring of
two, groups of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attached import OPTIONS
from harness import Rank
from rows import Rows, row_values
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


_plain: dict[tuple[Any, ...], torch.Tensor] = {}
"""What scripts made on plain DDP in this process, where the rows of a table have the same one."""


def apart(rank: Rank, form: str, script: Callable[..., torch.Tensor], *args: Any) -> float:
    """The largest difference between an attached run of a script and one on plain DDP, and between the ranks."""
    rank.init("gloo")
    key = (script, *args)
    if key not in _plain:
        torch.manual_seed(0)
        _plain[key] = script(Script(rank, None), *args)
    torch.manual_seed(0)
    found = script(Script(rank, form), *args)
    others = [torch.empty_like(found) for _ in range(rank.size)]
    dist.all_gather(others, found)
    differences = torch.stack([other - found for other in (_plain[key], *others)])
    return float(differences.abs().max())  # NaN if one is


def check_apart(forms: Iterable[str], script: Callable[..., torch.Tensor], *args: Any, limit: float = 1e-6) -> None:
    """Each form's run of a script is that of plain DDP, on two ranks; fails with the forms whose is not."""
    check_rows_apart({form: (form, script, *args) for form in forms}, limit)


def check_rows_apart(rows: Rows, limit: float = 1e-6) -> None:
    """The same of other tables; a row has a form, a script and its arguments."""
    found = row_values(apart, 2, rows)
    far = {name: values for name, values in found.items() if not all(value < limit for value in values)}
    assert not far, f"apart from plain DDP: {far}"


def wide() -> nn.Sequential:
    """Large enough that parameters are still on their way when the next line reads them."""
    return nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 4))


def loss(script: Script) -> torch.Tensor:
    """Of the next inputs."""
    return (script.ddp(script.inputs()) - 1).square().mean()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
