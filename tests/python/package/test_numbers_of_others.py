"""Numbers and flags of NumPy, and tensors without dimensions, wherever Python's are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchext

Make = Callable[[Any], Any]
KINDS: dict[str, tuple[Make, Make, Make]] = {
    "numpy": (np.int64, np.float64, np.bool_),
    "numpy, narrow": (np.int32, np.float32, np.bool_),
    "tensors": (torch.tensor, lambda value: torch.tensor(value, dtype=torch.float64), torch.tensor),
}
each_kind = pytest.mark.parametrize(("whole", "real", "flag"), KINDS.values(), ids=KINDS)


@each_kind
def test_options_of_backends(whole: Make, real: Make, flag: Make) -> None:
    given: tuple[tuple[type, dict[str, Any], dict[str, Any]], ...] = (
        (
            torchext.PragueOptions,
            {"group_size": whole(2), "seed": whole(3), "shared_memory": flag(False)},
            {"group_size": 2, "seed": 3, "shared_memory": False},
        ),
        (
            torchext.DeAROptions,
            {"bucket_mb": real(2.0), "allreduce_fallback": flag(False)},
            {"bucket_mb": 2.0, "allreduce_fallback": False},
        ),
        (
            torchext.DSSyncOptions,
            {"schedule": "topology", "racks": [whole(0), whole(1)]},
            {"schedule": "topology", "racks": [0, 1]},
        ),
        (
            torchext.HopOptions,
            {"neighbours": [[whole(1)], [whole(0)]]},
            {"neighbours": [[1], [0]]},
        ),
    )
    for kind, options, expected in given:
        assert kind(**options) == kind(**expected), kind


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "tensors"])
def test_arrays_for_lists(array: Make) -> None:
    racks = torchext.DSSyncOptions(schedule="topology", racks=array([0, 0, 1]))
    assert racks == torchext.DSSyncOptions(schedule="topology", racks=[0, 0, 1])
    weights = torchext.HopOptions(weights=array([[0.5, 0.5], [0.5, 0.5]]))
    assert weights == torchext.HopOptions(weights=[[0.5, 0.5], [0.5, 0.5]])
    assert torchext.HopOptions(neighbours=array([[1], [0]])) == torchext.HopOptions(neighbours=[[1], [0]])


@pytest.mark.parametrize(
    "value", [np.float64(2.0), torch.tensor(2.0), torch.tensor([2, 3]), np.array([2, 3])], ids=repr
)
def test_what_is_no_int_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="PragueOptions: group_size must be an int, got"):
        torchext.PragueOptions(group_size=value)


def trained(whole: Make, real: Make, flag: Make) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torchext.optim.SPDKFAC(
        model,
        lr=real(0.125),
        momentum=real(0.5),
        weight_decay=real(0.25),
        nesterov=flag(True),
        damping=real(0.125),
        factor_decay=real(0.5),
        martens_decay=flag(False),
        factor_update_steps=whole(1),
        inverse_update_steps=whole(2),
        kl_clip=real(0.125),
        bucket_cap_mb=real(2.0),
        split_directions=flag(False),
        shared_memory=flag(False),
    )
    optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))], "momentum": real(0.25), "nesterov": flag(True), "lr": real(0.5)}
    )
    for _ in range(2):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        state = optimizer.state_dict()
        numbers = state["kfac"]
        numbers.update({name: whole(numbers[name]) for name in ("steps", "factor_updates")})
        numbers.update({name: real(numbers[name]) for name in ("damping", "kl_clip")})
        optimizer.load_state_dict(state)
        optimizer.kfac.damping, optimizer.kfac.kl_clip = real(0.25), real(0.25)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@each_kind
def test_kfac(whole: Make, real: Make, flag: Make) -> None:
    assert torch.equal(trained(whole, real, flag), trained(int, float, bool))


@each_kind
def test_adaptive_embeddings(whole: Make, real: Make, flag: Make) -> None:
    bag = torchext.nn.AdaptiveEmbeddingBag(whole(64), whole(8), budget=whole(16), chunk_dim=whole(4), seed=whole(1))
    assert bag.weight.shape == (64, 8)
    bag = torchext.nn.AdaptiveEmbeddingBag(64, 8, budget=real(0.5), include_last_offset=flag(True))
    assert bag.include_last_offset is True
