"""Models, data and the loop of the tests of distributed K-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import flat
from harness import Rank
from torch import Tensor, nn

from torchext.optim import KFAC, KFACPreconditioner

# Where the two paths differ in their arithmetic alone: tests/python compares that, and every exact strategy both paths.
mostly_cpu = pytest.mark.parametrize(
    "queued", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["cpu", "queued"]
)


def use_path(queued: bool) -> None:
    """From here on in this process: K-FAC's loops for the CPU, or what runs on accelerators, with CPU tensors."""
    defaults: Any = KFACPreconditioner.__init__.__kwdefaults__
    assert "_queued" in defaults
    defaults["_queued"] = queued


EXACT = ("spd", "pad", "comm-opt", "mem-opt", "hybrid", "d-kfac", "auto")
ROWS = 12  # of the whole batch: divisible by 1, 2, 3, 4


class Net(nn.Module):
    """Convolutions, one of them grouped, an embedding, a normalisation that is left alone, and Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2, stride=2)
        self.tokens = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(22)
        self.hidden = nn.Linear(22, 9)
        self.head = nn.Linear(9, 3, bias=False)
        self.double()

    def forward(self, image: Tensor, token: Tensor) -> Tensor:
        x = self.grouped(torch.tanh(self.conv(image))).flatten(1)
        x = self.norm(torch.cat([x, self.tokens(token)], 1))
        return self.head(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]


def whole_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(ROWS, 1, 5, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, 7, (ROWS,), generator=generator),
        torch.randint(0, 3, (ROWS,), generator=generator),
    )


def train(model: nn.Module, optimizer: Any, steps: int, *, first: int = 0, rank: int = 0, size: int = 1) -> None:
    for step in range(first, first + steps):
        image, token, target = (part.chunk(size)[rank] for part in whole_batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, token), target).backward()
        optimizer.step()


OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.01, "inverse_update_steps": 3}


def check_alike(models: Sequence[nn.Module], plans: Sequence[object], atol: float) -> None:
    """Two models have the same parameters. Plans depend on measured costs, and are part of the error."""
    one, other = (dict(model.named_parameters()) for model in models)
    differences = {name: float((one[name] - other[name]).detach().abs().max()) for name in one}
    alike = all(difference <= atol for difference in differences.values())  # nan is not
    assert alike, "\n".join([f"parameters differ by {differences}, allowed {atol}; the plans:", *map(str, plans)])


def run_alone(rank: Rank, steps: int, method: str, **options: Any) -> Tensor:
    """The whole batch in one process, with a group of one for K-FAC."""
    groups = [dist.new_group([r]) for r in range(rank.size)]
    model = Net()
    train(model, KFAC(model, method=method, process_group=groups[rank.rank], **(OPTIONS | options)), steps)
    return flat(model)


class Uneven(nn.Module):
    """Calls a layer as often as it is told, and one only where it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, inputs: Tensor, times: int, extra: bool) -> Tensor:
        for _ in range(times):
            inputs = torch.tanh(self.body(inputs))
        return self.head(self.extra(inputs) if extra else inputs)  # type: ignore[no-any-return]
