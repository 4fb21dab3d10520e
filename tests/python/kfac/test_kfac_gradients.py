"""In which forms gradients reach K-FAC's directions: memory layouts, scales, sizes, and what is not finite in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kfac_reference import same
from torch import Tensor, nn

from torchext.optim import KFACPreconditioner

Change = Callable[[Tensor], Tensor]


def network(bias: bool, groups: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, groups=groups, bias=bias), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5, bias=bias)
    ).to(dtype)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(10, 4, 6, dtype=torch.float64, generator=generator)
    (model(inputs).sin().sum(1).mean() * factor).backward()


def directions(model: nn.Module, method: str, change: Change, factor: float = 1.0) -> list[Tensor]:
    """After two steps, of which only the first inverts."""
    kfac = KFACPreconditioner(model, method=method, inverse_update_steps=2)
    for _ in range(2):
        model.zero_grad()
        backward(model, factor)
        for p in model.parameters():
            p.grad = change(p.grad)  # type: ignore[arg-type]
        assert kfac.step(lr=0.1, loss_scale=factor if factor != 1 else None, unscale=factor != 1)
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def with_gaps(gradient: Tensor) -> Tensor:
    return torch.stack([gradient, gradient], -1)[..., 0]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_layout_and_scale_of_gradients_do_not_matter(method: str, bias: bool, groups: int) -> None:
    expected = directions(network(bias, groups), method, lambda gradient: gradient)
    for change, factor in ((with_gaps, 1.0), (Tensor.clone, 8.0), (with_gaps, 8.0)):
        found = directions(network(bias, groups), method, change, factor)
        for one, other in zip(found, expected, strict=True):
            same(one, other, 1e-10)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["0.bias", "3.bias", "3.weight"])
def test_one_element_that_is_not_finite_leaves_all_gradients(name: str, scaled: bool) -> None:
    model = network(bias=True, groups=1)
    kfac = KFACPreconditioner(model, inverse_update_steps=1)
    backward(model)
    assert kfac.step(lr=0.1)
    model.zero_grad()
    backward(model)
    model.get_parameter(name).grad.view(-1)[-1] = float("nan")  # type: ignore[union-attr]
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    assert not kfac.step(lr=0.1, loss_scale=8.0 if scaled else None, unscale=scaled)
    assert kfac.stats()["skipped"] == 1
    for p, gradient in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad.nan_to_num(), gradient.nan_to_num())


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_large_layers_in_float32(method: str, onednn: bool) -> None:
    # Large enough for every way to a product that this machine has.
    found = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(160, 200), nn.Tanh(), nn.Linear(200, 150, bias=False)).to(dtype)
        kfac = KFACPreconditioner(model, method=method, inverse_update_steps=1, damping=0.1)
        inputs = torch.randn(64, 160, generator=torch.Generator().manual_seed(1)).to(dtype)
        model(inputs).sin().sum(1).mean().backward()
        with torch.backends.mkldnn.flags(enabled=onednn):
            assert kfac.step(lr=0.1)
        found[dtype] = [p.grad.double() for p in model.parameters()]  # type: ignore[union-attr]
    for one, other in zip(found[torch.float32], found[torch.float64], strict=True):
        same(one, other, 1e-4)
