"""Frozen weights of dtypes without an average, and scripted children: models are trained as by plain DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attached import flat, new_group
from harness import Rank
from rows import row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

# With two ranks these are DDP's steps, to rounding.
EXACT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("prague", {"order": "atc", "generator": "static"}),
    ("hop", {"graph": "ring", "order": "serial"}),
    ("dssync", {"order": "atc"}),
    ("dear", {"form": "sharded", "allreduce_fallback": False}),
    ("dear", {"form": "replicated", "allreduce_fallback": False}),
    ("dear", {}),
)
AVERAGING = ("prague", "hop", "dssync")
DTYPES = (torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)


class Quantized(nn.Module):
    """A frozen weight of some dtype, as parameter or buffer, beside an adapter that is trained."""

    def __init__(self, dtype: torch.dtype, as_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randint(0, 8, (3, 4)).to(dtype)
        if as_buffer:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.real if self.weight.is_complex() else self.weight
        return inputs @ weight.float().t() * 0.1 + self.up(self.down(inputs))  # type: ignore[no-any-return]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(inputs))  # type: ignore[no-any-return]


def trained(rank: int, model: nn.Module, group: dist.ProcessGroup | None, *, owned: bool) -> nn.Module:
    """The model after five steps, by plain DDP where there is no group. owned: frozen weights by the optimizer."""
    # Gloo has no float8, so that plain DDP takes such a model only if it sends nothing of it.
    sends = all(tensor.dtype != torch.float8_e4m3fn for tensor in (*model.parameters(), *model.buffers()))
    ddp = DistributedDataParallel(model, process_group=group, init_sync=sends, broadcast_buffers=sends)
    stepped = [p for p in ddp.parameters() if owned or p.requires_grad]
    optimizer = torch.optim.SGD(stepped, lr=0.1, momentum=0.9)
    sync = None if group is None else torchext.attach(ddp, optimizer)
    generator = torch.Generator().manual_seed(rank)  # each rank's own data
    for _ in range(5):
        optimizer.zero_grad()
        (ddp(torch.randn(5, 4, generator=generator)) - 1).square().mean().backward()
        optimizer.step()
    if sync is not None:
        if not isinstance(sync, torchext.DearSynchronizer):
            with sync.averaged():
                pass
        sync.synchronize()
        sync.detach()
    return model


def of_adapter(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])


def body_quantized(rank: Rank, backend: str, options: dict[str, Any], exact: bool) -> None:
    rank.init("gloo")
    group = new_group(backend, **options)
    for dtype in DTYPES:
        for as_buffer in (False, True):
            for owned in (False, True):
                model: Any = trained(rank.rank, Quantized(dtype, as_buffer), group, owned=owned)
                before: Any = Quantized(dtype, as_buffer).weight
                assert model.weight.dtype == dtype
                assert torch.equal(model.weight.to(torch.complex64), before.to(torch.complex64)), (dtype, as_buffer)
                expected: Any = Quantized(torch.int8, False)
                expected.weight.data.copy_(before.real if before.is_complex() else before.to(torch.int8))
                start = of_adapter(expected)
                trained(rank.rank, expected, None, owned=owned)
                if exact:
                    torch.testing.assert_close(of_adapter(model), of_adapter(expected), rtol=1e-5, atol=1e-5)
                else:
                    apart = (of_adapter(model) - of_adapter(expected)).norm()
                    assert apart < 0.3 * (of_adapter(expected) - start).norm(), (dtype, as_buffer, owned)


def test_frozen_weights_without_an_average() -> None:
    row_values(body_quantized, 2, {f"{backend} {options}": (backend, options, True) for backend, options in EXACT})


def test_frozen_weights_without_an_average_by_default() -> None:
    row_values(body_quantized, 2, {backend: (backend, {}, False) for backend in AVERAGING})


def body_own(rank: Rank, backend: str) -> None:
    """Each worker's own ones stay what they are where all meet."""
    rank.init("gloo")
    ddp = DistributedDataParallel(Quantized(torch.int8, False), process_group=new_group(backend))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = torchext.attach(ddp, optimizer)
    ddp.module.weight.fill_(rank.rank)
    with sync.averaged():
        assert (ddp.module.weight == rank.rank).all()
    sync.synchronize()
    assert (ddp.module.weight == rank.rank).all()
    sync.detach()


def test_frozen_weights_without_an_average_stay_each_workers_own() -> None:
    row_values(body_own, 2, {backend: (backend,) for backend in AVERAGING})


def body_scripted(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    rank.init("gloo")
    model = trained(rank.rank, Scripted(), new_group(backend, **options), owned=True)
    expected = trained(rank.rank, Scripted(), None, owned=True)
    torch.testing.assert_close(flat(model), flat(expected), rtol=1e-5, atol=1e-5)


def test_a_scripted_child() -> None:
    row_values(body_scripted, 2, {f"{backend} {options}": (backend, options) for backend, options in EXACT})
