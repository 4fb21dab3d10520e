"""Directions on a processor's matrix tiles (``direction_precision="high"``) beside float32 and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchext.optim import KFAC, KFACPreconditioner

# Not of rows, which each optimizer chooses by costs of its own.
OPTIONS = {"damping": 0.03, "inverse_update_steps": 2, "kl_clip": None, "gather_rows": False}


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 33, bias=False), nn.Tanh(), nn.Linear(33, 5))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(8, 64, 3, groups=2), nn.Tanh(), nn.Conv2d(64, 40, 3, stride=2), nn.Flatten(), nn.Linear(160, 3)]
    return nn.Sequential(*layers)


def frozen_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model[0].bias.requires_grad_(False)
    return model


SHAPES = {wide: (70,), convolutions: (8, 7, 7), frozen_bias: (64,)}


def directions(make: Callable[[], nn.Module], precision: str, dtype: torch.dtype) -> tuple[list[Tensor], bool]:
    """Of the third step, after inverses were made twice."""
    torch.manual_seed(0)
    model = make().to(dtype)
    kfac = KFACPreconditioner(model, direction_precision=precision, **OPTIONS)
    for step in range(3):
        model.zero_grad()
        kfac.discard()
        inputs = torch.randn(20, *SHAPES[make], generator=torch.Generator().manual_seed(step)).to(dtype)
        model(inputs).square().mean().backward()
        if step == 2 and make is frozen_bias:
            model[2].bias.grad = None  # frozen in training
        assert kfac.step()
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return gradients, kfac.plan().as_dict["tiles"]


@pytest.mark.parametrize("make", [wide, convolutions, frozen_bias])
def test_directions_are_right_to_sixteen_bits(make: Callable[[], nn.Module]) -> None:
    exact, on_tiles = directions(make, "high", torch.float64)
    assert not on_tiles
    highest, on_tiles = directions(make, "highest", torch.float32)
    assert not on_tiles
    high, on_tiles = directions(make, "high", torch.float32)
    differs = False
    for expected, plain, found in zip(exact, highest, high, strict=True):
        assert (plain - expected).norm() < 1e-5 * expected.norm()
        assert (found - expected).norm() < 3e-5 * expected.norm()
        differs = differs or not torch.equal(plain, found)
    assert differs == on_tiles


def test_where_the_tiles_are_not_used() -> None:
    small = nn.Linear(31, 40, bias=False)
    assert not KFAC(small).plan().as_dict["tiles"]
    assert not KFAC(nn.Linear(40, 40), method="eigen").plan().as_dict["tiles"]
    assert not KFAC(nn.Linear(40, 40), direction_precision="highest").plan().as_dict["tiles"]
    plan = KFAC(nn.Linear(40, 40)).plan()
    assert ("AMX" in str(plan)) == plan.as_dict["tiles"]


def test_new_inverses_are_used_at_once_and_loaded_ones_too() -> None:
    def run(optimizer: KFAC, model: nn.Module, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64))
    optimizer = KFAC(model, lr=0.05, **OPTIONS)
    run(optimizer, model, range(3))
    other = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64))
    taken = KFAC(other, lr=0.05, **OPTIONS)
    run(taken, other, range(1))  # has inverses of its own by now
    other.load_state_dict(model.state_dict())
    taken.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else momentum would be one tensor of both
    run(optimizer, model, range(3, 6))
    run(taken, other, range(3, 6))
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)


def test_threads_do_not_change_the_bits() -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            model = nn.Linear(300, 400)
            kfac = KFACPreconditioner(model, **OPTIONS)
            model(torch.eye(300)).sum().backward()
            kfac.step()
            state = kfac.state_dict()
            model.weight.grad = torch.randn(400, 300, generator=torch.Generator().manual_seed(1))
            model.bias.grad = torch.randn(400, generator=torch.Generator().manual_seed(2))
            if found:  # inverses may differ with the threads of LAPACK
                kfac.load_state_dict(found[0][1])
            kfac.step()
            found.append((model.weight.grad.clone(), state))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
