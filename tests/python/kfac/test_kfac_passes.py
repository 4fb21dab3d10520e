"""Which forward and backward passes K-FAC counts, and as what, on both paths of the engine."""

from __future__ import annotations

import warnings

import pytest
import torch
from kfac_models import data, flat, mlp, train
from kfac_reference import Reference, same, written
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchext.optim import KFAC, KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")


def test_accumulated_micro_batches_are_one_batch() -> None:
    models = [mlp(), mlp()]
    kfacs = [KFACPreconditioner(model, inverse_update_steps=1) for model in models]
    for step in range(3):
        inputs, targets = data(seed=step)
        for model, kfac, parts in zip(models, kfacs, (1, 3), strict=True):
            model.zero_grad()
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(x), y) / parts).backward()
            kfac.step(lr=0.1)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            same(other.grad, one.grad, 1e-9)  # type: ignore[arg-type]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(inputs)))  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


def one_direction(model: nn.Module, weight: nn.Parameter) -> Tensor:
    kfac = KFACPreconditioner(model, inverse_update_steps=1, kl_clip=None)
    model(data()[0]).sin().sum(1).mean().backward()
    kfac.step()
    assert weight.grad is not None
    return weight.grad


def test_called_twice_and_tied_are_positions_of_one_layer() -> None:
    torch.manual_seed(0)
    twice, tied = Twice().double(), Tied().double()
    tied.first.load_state_dict(twice.shared.state_dict())
    inputs = data()[0]
    # The definition: both calls' samples as two positions of one sequence.
    reference = Reference([twice.shared])
    twice(inputs).sin().sum(1).mean().backward()
    (late_in, late_g), (early_in, early_g) = reference.seen[twice.shared]
    reference.seen[twice.shared] = [(torch.stack([early_in, late_in], 1), torch.stack([early_g, late_g], 1))]
    expected = reference.directions()[twice.shared]
    twice.zero_grad()
    found = one_direction(twice, twice.shared.weight)
    same(written(twice.shared), expected)
    same(one_direction(tied, tied.first.weight), found, 1e-12)


def test_a_layer_that_is_not_used_in_a_step() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()
    optimizer = KFAC(model, lr=0.1, inverse_update_steps=1)
    for step in range(6):
        optimizer.zero_grad()
        inputs, targets = data(seed=step)
        output = model[0](inputs) + (model[1](inputs) if step % 2 else 0)
        before = flat(model[1])
        nn.functional.cross_entropy(output, targets).backward()
        optimizer.step()
        assert torch.equal(flat(model[1]), before) == (step % 2 == 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_seen_once(reentrant: bool) -> None:
    def checkpointed(model: nn.Sequential, inputs: Tensor) -> Tensor:
        return checkpoint(model, inputs, use_reentrant=reentrant)  # type: ignore[no-any-return]

    grads = []
    for run in (lambda model, x: model(x), checkpointed):
        model = mlp()
        kfac = KFACPreconditioner(model, inverse_update_steps=1)
        inputs, targets = data()
        inputs.requires_grad_(True)
        nn.functional.cross_entropy(run(model, inputs), targets).backward()
        kfac.step()
        grads.append(written(model[0]))
    same(grads[1], grads[0], 1e-12)


def test_reentrant_checkpoints_of_one_module_are_one_pass() -> None:
    factors = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)]).double()
        optimizer = KFAC(model, lr=0.1, factor_decay=0.0)
        inputs, targets = data()
        inputs.requires_grad_(True)
        for _ in range(2):
            inputs = checkpoint(model[0], inputs, use_reentrant=True) if again else model[0](inputs)
        nn.functional.cross_entropy(model[1](inputs), targets).backward()
        optimizer.step()
        factors.append([factor[0] for factor in optimizer.state_dict()["kfac"]["factors"]])
    for plain, checkpointed in zip(*factors, strict=True):
        same(checkpointed, plain, 1e-12)


def test_forward_passes_that_train_nothing_leave_no_trace() -> None:
    """Under no_grad in train mode, in inference mode, and with a graph that is never used."""
    models = [mlp(), mlp()]
    for model, extra in zip(models, (False, True), strict=True):
        optimizer = KFAC(model, lr=0.1, inverse_update_steps=1)
        for step in range(3):
            if extra:
                with torch.no_grad():
                    model(100 * data()[0])
                with torch.inference_mode():
                    model(100 * data()[0])
                model(100 * data()[0])
            train(model, optimizer, 1, step)
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_gradients_that_reach_no_weight_leave_no_trace() -> None:
    """torch.autograd.grad() with respect to the input; torch.func."""
    models = [mlp(), mlp()]
    for model, extra in zip(models, (False, True), strict=True):
        optimizer = KFAC(model, lr=0.1, inverse_update_steps=1)
        for step in range(3):
            optimizer.zero_grad()
            batch, targets = data(seed=step)
            if extra:
                inputs = data()[0].requires_grad_(True)
                torch.autograd.grad(1000 * model(inputs).sum(), inputs)
                weights = {name: p.detach() for name, p in model.named_parameters()}

                def loss(weights: dict[str, Tensor], model: nn.Module = model, inputs: Tensor = inputs) -> Tensor:
                    return torch.func.functional_call(model, weights, (inputs,)).sum()  # type: ignore[no-any-return]

                torch.func.grad(loss)(weights)
                torch.func.vmap(model)(inputs)
            nn.functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_autograd_grad_of_the_weights_counts() -> None:
    directions = []
    for by_hand in (False, True):
        model = mlp()
        kfac = KFACPreconditioner(model, inverse_update_steps=1)
        loss = nn.functional.cross_entropy(model(data()[0]), data()[1])
        if by_hand:
            weights = list(model.parameters())
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = gradient
        else:
            loss.backward()
        kfac.step()
        directions.append(written(model[0]))
    assert torch.equal(directions[0], directions[1])


def test_torch_compile() -> None:
    models = [mlp(), mlp()]
    optimizers = [KFAC(model, lr=0.1, inverse_update_steps=2) for model in models]
    compiled = torch.compile(models[1], backend="eager")
    train(models[0], optimizers[0], 4)
    train(compiled, optimizers[1], 4)  # type: ignore[arg-type]
    assert optimizers[1].stats()["factor_updates"] == 4
    same(flat(models[1]), flat(models[0]), 1e-9)


def test_a_model_compiled_and_run_before_its_optimizer_is_told() -> None:
    torch.compiler.reset()
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    compiled(data()[0]).sum().backward()
    optimizer = KFAC(model, lr=0.1)
    with pytest.warns(UserWarning, match="no call of 0, 2, which have gradients"):
        train(compiled, optimizer, 1)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(compiled, optimizer, 1)  # type: ignore[arg-type]
