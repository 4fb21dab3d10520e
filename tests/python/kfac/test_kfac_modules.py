"""Modules that K-FAC must see otherwise than plain ones, or leave alone, on both paths of the engine."""

from __future__ import annotations

import pytest
import torch
from kfac_models import data, mlp
from kfac_reference import Reference, same, written
from torch import Tensor, nn

from torchext.errors import NoSupportedLayerError
from torchext.optim import SPDKFAC, KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")


def test_an_embedding_tied_to_a_linear_keeps_its_gradient() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(5, 4), "mid": nn.Linear(4, 4), "out": nn.Linear(4, 5, bias=False)})
    model["out"].weight = model["in"].weight
    kfac = KFACPreconditioner(model)
    assert kfac.layers == ["mid"]
    model["out"](model["mid"](model["in"](torch.arange(5)))).sin().sum().backward()
    before = model["in"].weight.grad.clone()
    kfac.step()
    assert torch.equal(model["in"].weight.grad, before)


def test_frozen_bias_and_frozen_layer() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    bias = model[0].bias.detach().clone()
    reference = Reference([model[0], model[2]], kl_clip=1e-3)
    kfac = KFACPreconditioner(model, inverse_update_steps=1)
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    expected = reference.directions()
    kfac.step()
    same(written(model[0]), expected[model[0]])
    assert torch.equal(model[0].bias, bias)
    model[2].requires_grad_(False)
    assert KFACPreconditioner(model).layers == ["0"]


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_bias_frozen_in_training_leaves_its_weight_to_kfac(clip: float | None) -> None:
    model, twin = mlp(), mlp()
    inputs, targets = data()
    for trained in (model, twin):
        kfac = KFACPreconditioner(trained, kl_clip=clip, inverse_update_steps=10)
        for step in range(2):
            trained.zero_grad()
            trained[2].bias.requires_grad_(trained is twin or step == 0)
            nn.functional.cross_entropy(trained(inputs), targets).backward()
            if trained is twin and step == 1:
                trained[2].bias.grad.zero_()  # what one that is not there counts as
            plain = trained[2].weight.grad.clone()
            kfac.step()
        assert not torch.allclose(plain, trained[2].weight.grad, rtol=1e-2)
    assert model[2].bias.grad is None
    same(model[2].weight.grad, twin[2].weight.grad)
    same(model[0].weight.grad, twin[0].weight.grad)


@pytest.mark.parametrize("front", [False, True])
def test_what_is_not_stepped_keeps_its_gradient(front: bool) -> None:
    model = mlp()
    layer = model[2]
    inputs, targets = data()

    def directions(parameters: list[nn.Parameter]) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
        for parameter in model.parameters():
            parameter.grad = None
        optimizer: torch.optim.Optimizer
        if front:
            optimizer = torch.optim.SGD(parameters, lr=0.0)
            kfac = KFACPreconditioner(model, optimizer, kl_clip=None, inverse_update_steps=1)
        else:
            optimizer = SPDKFAC(model, parameters, lr=0.0, kl_clip=None, inverse_update_steps=1)
            kfac = optimizer.kfac
        nn.functional.cross_entropy(model(inputs), targets).backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        return kfac.layers, before, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    layers, before, after = directions(list(layer.parameters()))
    assert layers == ["2"]
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert torch.equal(before["0.bias"], after["0.bias"])
    assert not torch.equal(before["2.weight"], after["2.weight"])
    _, _, of_all = directions(list(model.parameters()))
    same(after["2.weight"], of_all["2.weight"])
    same(after["2.bias"], of_all["2.bias"])
    layers, before, without_bias = directions([layer.weight])
    assert torch.equal(before["2.bias"], without_bias["2.bias"])
    layer.bias.requires_grad_(False)
    _, _, frozen = directions(list(model.parameters()))
    same(without_bias["2.weight"], frozen["2.weight"])
    with pytest.raises(NoSupportedLayerError, match="that the optimizer steps"):
        directions([model[0].bias])


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match="0 is a lazy module without parameters; run one forward pass first"):
        SPDKFAC(model)
    model(torch.randn(3, 5))
    optimizer = SPDKFAC(model)
    model(torch.randn(3, 5)).sum().backward()
    optimizer.step()


def test_multihead_attention_keeps_its_gradients() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attend": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 2)}).double()
    optimizer = KFACPreconditioner(model)
    assert optimizer.layers == ["head"]
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    model["head"](model["attend"](x, x, x)[0]).sin().sum().backward()
    before = {name: p.grad.clone() for name, p in model["attend"].named_parameters() if p.grad is not None}
    assert set(before) == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    optimizer.step()
    for name, p in model["attend"].named_parameters():
        assert torch.equal(p.grad, before[name])  # type: ignore[arg-type]


def test_in_place_activations_and_keyword_inputs() -> None:
    torch.manual_seed(0)
    models = [mlp(), mlp()]
    inputs, targets = data()
    for model, activation in zip(models, (torch.relu, torch.relu_), strict=True):
        kfac = KFACPreconditioner(model, inverse_update_steps=1)
        hidden = activation(model[0](input=inputs))
        nn.functional.cross_entropy(model[2](hidden), targets).backward()
        kfac.step()
    same(written(models[1][0]), written(models[0][0]), 1e-12)


class Renamed(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def test_a_subclass_that_names_its_input_otherwise() -> None:
    model = Renamed(6, 3)
    kfac = KFACPreconditioner(model)
    model(scale=2.0, x=torch.randn(4, 6)).sum().backward()
    assert kfac.step()
