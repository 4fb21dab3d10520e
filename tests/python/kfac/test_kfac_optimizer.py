"""K-FAC's steps: against the definition, with closures, strides and other optimizers, on both paths of the engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kfac_models import data, flat, mlp, train
from kfac_reference import Reference, same
from torch import Tensor, nn

from torchext.optim import KFAC, PADKFAC, SPDKFAC, KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("martens", [False, True])
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_a_network_against_the_definition(method: str, martens: bool) -> None:
    """Running averages, inverses every 3 steps, the clip over all layers, momentum and weight decay."""
    model, plain = mlp(), mlp()
    reference = Reference(
        [plain[0], plain[2]], method=method, kl_clip=1e-3, lr=0.1, inverse_every=3, damping=0.01, martens=martens
    )
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    kfac = SPDKFAC(
        model,
        lr=0.1,
        weight_decay=1e-3,
        method=method,
        damping=0.01,
        inverse_update_steps=3,
        martens_decay=martens,
    )
    for step in range(8):
        train(model, kfac, 1, step)
        sgd.zero_grad()
        inputs, targets = data(seed=step)
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        for module, found in reference.directions().items():
            module.weight.grad.copy_(found[:, :-1])  # type: ignore[union-attr, operator]
            module.bias.grad.copy_(found[:, -1])  # type: ignore[union-attr, operator]
        sgd.step()
        same(flat(model), flat(plain))


def test_one_step_reaches_the_optimum_of_a_linear_gaussian_model() -> None:
    """There G = I times the noise's scale, and A (x) G is the Hessian: K-FAC is Newton's method."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 5, dtype=torch.float64)
    weights, noise = torch.randn(5, 2, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    targets = inputs @ weights + 1 + 0.1 * noise
    model = nn.Linear(5, 2).double()
    # Samples whose output gradients are exactly white: the Fisher's own, by an antithetic set of unit residuals.
    units = torch.eye(2, dtype=torch.float64).repeat(20, 1) * 2**0.5
    optimizer = KFAC(model, lr=1.0, momentum=0.0, damping=1e-12, factor_decay=0.0, kl_clip=None, inverse_update_steps=1)
    output = model(inputs)
    # The engine sees `units` as the gradients at the output; .grad is then replaced by the loss's own.
    output.backward(units / len(inputs))
    gradient = (output.detach() - targets) / len(inputs)
    model.weight.grad = gradient.T @ inputs
    model.bias.grad = gradient.sum(0)
    optimizer.step()
    design = torch.cat([inputs, torch.ones(40, 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(design, targets).solution.T
    same(torch.cat([model.weight, model.bias[:, None]], 1).detach(), best, 1e-5)


def test_closure_schedulers_and_groups() -> None:
    model = mlp()
    optimizer = PADKFAC(
        model, [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inputs, targets = data()
    before = flat(model[2])

    def closure() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return float(loss.detach())

    losses = []
    for _ in range(4):
        losses.append(optimizer.step(closure))
        scheduler.step()
    assert losses[-1] < losses[0]
    assert torch.equal(flat(model[2]), before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)


class Strided(nn.Module):
    """A layer, and a parameter that K-FAC leaves alone, with the strides of `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3)
        self.base = torch.randn(6, 8)
        if how == "slice":
            self.weight = nn.Parameter(self.base[:, :6])
        else:
            self.weight = nn.Parameter(torch.randn(6, 6).t() if how == "transposed" else torch.randn(6, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs @ self.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["slice", "transposed", "gradient", "momentum"])
def test_any_strides_are_stepped_as_sgd_does(how: str) -> None:
    model = Strided(how)
    outside = model.base[:, 6:].clone()
    optimizer = SPDKFAC(model, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    twin = model.weight.detach().clone()
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = data(seed=step)
        nn.functional.cross_entropy(model(inputs.float()), targets).backward()
        gradient = model.weight.grad
        assert gradient is not None
        if how == "gradient":
            model.weight.grad = gradient = gradient.t().contiguous().t()
        if how == "momentum" and step == 1:  # as of a checkpoint made with other strides
            state = optimizer.state[model.weight]
            state["momentum_buffer"] = state["momentum_buffer"].t().contiguous().t()
        twin.grad = gradient.clone()
        optimizer.step()
        sgd.step()
        same(model.weight.detach(), twin, 1e-6)
    assert torch.equal(model.base[:, 6:], outside)


def test_a_sparse_gradient_is_stepped_as_sgd_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3))
    optimizer = SPDKFAC(model, lr=0.1, momentum=0.9)
    twin = model[0].weight.detach().clone()
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 10, (4,))).sin().sum().backward()
        twin.grad = model[0].weight.grad.clone()
        optimizer.step()
        sgd.step()
        same(model[0].weight.detach(), twin, 1e-6)


class Calls(torch.optim.SGD):
    """Calls its parent's step, around which torch runs all hooks once more."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_closure_in_front_of_another_optimizer() -> None:
    ways = list(itertools.product((torch.optim.SGD, Calls), ("none", "positional", "keyword")))
    models, inputs, targets = [mlp() for _ in ways], *data()
    for model, (kind, how) in zip(models, ways, strict=True):
        optimizer = kind(model.parameters(), lr=0.1)
        kfac = KFACPreconditioner(model, optimizer, inverse_update_steps=1)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return float(loss.detach())

        for _ in range(3):
            if how == "none":
                closure()
                optimizer.step()
            else:
                assert (optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)) > 0
        assert kfac.stats()["steps"] == 3
    assert all(torch.equal(flat(model), flat(models[0])) for model in models[1:])


class Evaluates(torch.optim.SGD):
    """Calls its closure twice."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return closure()


def test_an_optimizer_with_several_gradients_a_step_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="optimizer = LBFGS"):
        KFACPreconditioner(model, torch.optim.LBFGS(model.parameters()))
    optimizer = Evaluates(model.parameters(), lr=0.1)
    KFACPreconditioner(model, optimizer)
    with pytest.raises(RuntimeError, match="Evaluates calls its closure more than once"):
        optimizer.step(lambda: model(data()[0]).sum().backward())


def test_kl_clip_none_and_its_bound() -> None:
    for kappa in (None, 1e-6, 1e9):
        model = mlp()
        optimizer = KFAC(model, lr=0.1, kl_clip=kappa)
        train(model, optimizer, 1)
        clip = optimizer.stats()["clip"]
        assert clip < 1 if kappa == 1e-6 else clip == 1
    optimizer.kfac.kl_clip = None
    assert optimizer.kfac.kl_clip is None


def test_other_parameters_keep_their_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    kfac = KFACPreconditioner(model)
    model(data()[0]).sin().sum().backward()
    before = model[1].weight.grad.clone()
    kfac.step()
    assert torch.equal(model[1].weight.grad, before)


def test_the_plan_prints() -> None:
    model = mlp()
    optimizer = KFAC(model)
    train(model, optimizer, 2)
    text = str(optimizer.plan())
    assert "strategy spd, 1 rank(s)" in text
    assert "A 9" in text
    assert "predicted; measured" in text
