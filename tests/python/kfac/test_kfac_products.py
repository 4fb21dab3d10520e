"""The arithmetic of directions on the CPU: both orders of the products, and sums over gradients of odd sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from torchext import _C
from torchext.optim import KFACPreconditioner

# Not of rows, which each optimizer chooses by costs of its own; not on tiles, which have products of their own.
OPTIONS = {"damping": 0.03, "kl_clip": None, "gather_rows": False, "direction_precision": "highest"}


@pytest.fixture(autouse=True)
def own_choice() -> Iterator[None]:
    """Ends with the processor's choice."""
    yield
    _C.set_prefers_linear_products(None)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(200, 230), nn.Tanh(), nn.Linear(230, 33, bias=False), nn.Tanh(), nn.Linear(33, 5))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(8, 160, 3, groups=2), nn.Tanh(), nn.Conv2d(160, 40, 3, stride=2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(160, 3))


SHAPES = {linear: (200,), convolutions: (8, 7, 7)}


def directions(make: Callable[[], nn.Module], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = make().to(dtype)
    kfac = KFACPreconditioner(model, **OPTIONS)
    model(
        torch.randn(20, *SHAPES[make], generator=torch.Generator().manual_seed(1)).to(dtype)
    ).square().mean().backward()
    assert kfac.step()
    return [p.grad.double() for p in model.parameters()]


@pytest.mark.parametrize("make", [linear, convolutions])
def test_both_orders_of_the_products_are_right(make: Callable[[], nn.Module]) -> None:
    found, exact = {}, {}
    for transposed in (False, True):
        _C.set_prefers_linear_products(transposed)
        found[transposed] = directions(make, torch.float32)
        exact[transposed] = directions(make, torch.float64)
    for straight, other in zip(exact[False], exact[True], strict=True):
        assert (straight - other).norm() < 1e-12 * straight.norm()
    for transposed in (False, True):
        for of_float, of_double in zip(found[transposed], exact[False], strict=True):
            assert (of_float - of_double).norm() < 1e-5 * of_double.norm()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("transposed", [False, True])
def test_transposed_products_are_those_of_onednn(transposed: bool) -> None:
    _C.set_prefers_linear_products(transposed)
    with torch.profiler.profile() as profile:
        directions(linear, torch.float32)
    called = {event.key for event in profile.key_averages()}
    assert ("mkldnn::_linear_pointwise" in called) == transposed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_at_every_place(bad: float) -> None:
    model = nn.Linear(37, 3)
    kfac = KFACPreconditioner(model, **OPTIONS)
    inputs = torch.randn(8, 37, generator=torch.Generator().manual_seed(0))
    for place in range(3 * 37 + 3):
        model.zero_grad()
        model(inputs).square().mean().backward()
        gradient = model.weight.grad if place < 3 * 37 else model.bias.grad
        gradient.view(-1)[place % (3 * 37)] = bad
        assert not kfac.step()
    assert kfac.stats()["skipped"] == 3 * 37 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 64, 95])
def test_the_clips_sum_is_that_of_all_elements(width: int, dtype: torch.dtype) -> None:
    """nu = sqrt(kl_clip / (lr^2 <V, dW>))."""
    lr, kl_clip = 0.7, 1e-3
    model = nn.Linear(width, 3).to(dtype)
    options = {**OPTIONS, "kl_clip": kl_clip}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    kfac = KFACPreconditioner(model, optimizer, **options)
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    (1e3 * model(inputs)).square().mean().backward()
    before = [p.grad.double().clone() for p in model.parameters()]
    optimizer.step()
    after = [p.grad.double() for p in model.parameters()]
    nu = kfac.stats()["clip"]
    products = sum(float((a / nu * b).sum()) for a, b in zip(after, before, strict=True))
    assert nu == pytest.approx(math.sqrt(kl_clip / (lr * lr * abs(products))), rel=1e-5)
    assert nu < 1
