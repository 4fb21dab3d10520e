"""Layers whose forward pass is not the one of torch's class, inputs that change afterwards, and odd parameters."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchext.optim import SPDKFAC, KFACPreconditioner


class Positions(nn.Embedding):
    """Called with what it does not look up: transformers' positions are made in there."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids % self.num_embeddings)


def test_an_embedding_with_a_forward_of_its_own_keeps_its_gradient() -> None:
    model = nn.Sequential(Positions(4, 8), nn.Linear(8, 2))
    kfac = KFACPreconditioner(model)
    assert kfac.layers == ["1"]
    model(torch.full((4,), 10**7)).sum().backward()  # would be counted far outside
    gradient = model[0].weight.grad.clone()  # type: ignore[union-attr]
    kfac.step()
    assert (model[0].weight.grad.ne(0) == gradient.ne(0)).all()  # type: ignore[union-attr]


class Padding(nn.Conv2d):
    """As timm's Conv2dSame."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.pad(images, (2, 2, 2, 2)))


class Slicing(nn.Conv2d):
    """As in slimmable networks."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(images, self.weight[:2], self.bias[:2])  # type: ignore[index]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(Padding(3, 4, 5), (2, 3, 2, 2)), (Slicing(3, 4, 3), (2, 3, 6, 6))],
    ids=["pads", "slices"],
)
def test_a_call_that_is_not_the_layers_is_refused_by_name(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.ModuleDict({"odd": layer, "plain": nn.Linear(3, 3)})
    optimizer = SPDKFAC(model)
    with pytest.raises(ValueError, match=r"odd with a weight of .* in skip_layers"):
        model["odd"](torch.randn(*shape))
    optimizer.kfac.remove()
    kfac = KFACPreconditioner(model, skip_layers=["odd"])
    model["odd"](torch.randn(*shape)).sum().backward()
    assert kfac.layers == ["plain"]


def test_the_model_may_be_a_multihead_attention() -> None:
    model = nn.MultiheadAttention(4, 2)
    with pytest.raises(ValueError, match="no Linear"):
        KFACPreconditioner(model)


def test_reduced_sequences_are_those_of_linear_layers() -> None:
    ids, weights = torch.randint(0, 6, (4, 5)), torch.randn(6, 3, dtype=torch.float64)
    gradients = []
    for sequences in ("expand", "reduce"):
        model = nn.Embedding(6, 3, _weight=weights.clone())
        kfac = KFACPreconditioner(model, sequences=sequences)
        model(ids).square().mean().backward()
        kfac.step()
        gradients.append(model.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def directions(changed: bool, layer: nn.Module, rows: torch.Tensor, *, autocast: bool) -> torch.Tensor:
    kfac = KFACPreconditioner(layer)
    rows = rows.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = layer(rows).float().square().mean()
    if changed:
        rows.zero_()
    layer.zero_grad()
    loss.backward()
    kfac.step()
    kfac.remove()
    assert isinstance(layer.weight, torch.Tensor) and layer.weight.grad is not None
    return layer.weight.grad.clone()


def test_an_input_may_change_once_autocast_has_copied_it() -> None:
    layer, rows = nn.Linear(6, 3), torch.randn(8, 6)
    torch.testing.assert_close(
        directions(True, layer, rows, autocast=True), directions(False, layer, rows, autocast=True), rtol=0, atol=0
    )


def test_an_input_that_changes_unseen_by_autograd_is_an_error() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    with pytest.raises(ValueError, match="was changed in place between the forward and the backward pass"):
        directions(True, layer, torch.randn(2, 2, 5, 5), autocast=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_parameters_of_16_bits_are_stepped_as_sgd_does(dtype: torch.dtype, momentum: float) -> None:
    steps = []
    for kfac in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).to(dtype)
        optimizer: torch.optim.Optimizer = (
            SPDKFAC(model, lr=0.5, momentum=momentum, factor_update_steps=100, inverse_update_steps=100)
            if kfac
            else torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
        )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
            if isinstance(optimizer, SPDKFAC):  # directions are K-FAC's; how they are taken is SGD's
                with torch.no_grad():
                    optimizer._step_group(optimizer.param_groups[0])
            else:
                optimizer.step()
        steps.append([now.detach() - then for now, then in zip(model.parameters(), before, strict=True)])
    for own, sgds in zip(*steps, strict=True):
        torch.testing.assert_close(own, sgds, rtol=0, atol=0)
        assert own.abs().max() > 0


def test_a_complex_parameter_is_stepped_as_sgd_does() -> None:
    model = nn.Linear(4, 4)
    model.factor = nn.Parameter(torch.full((3,), 1 + 1j, dtype=torch.cfloat))
    optimizer = SPDKFAC(model, lr=0.1, momentum=0.0)
    (model(torch.randn(2, 4)).sum() + model.factor.abs().square().sum()).backward()
    gradient = model.factor.grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    torch.testing.assert_close(model.factor.detach(), torch.full((3,), 1 + 1j) - 0.1 * gradient)


def test_a_model_that_has_moved_to_another_device_is_refused() -> None:
    model = nn.Linear(4, 4)
    SPDKFAC(model)
    optimizer = SPDKFAC(moved := nn.Linear(4, 4))
    moved.to("meta")
    with pytest.raises(ValueError, match=re.escape("was on cpu when the optimizer was made")):
        moved(torch.randn(2, 4, device="meta"))
    del optimizer
