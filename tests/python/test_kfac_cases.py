"""Every case in which public K-FAC code crashes or is silently wrong, on both paths of the engine."""

from __future__ import annotations

import warnings

import pytest
import torch
from kfac_models import data, flat, mlp, train
from kfac_reference import Reference, same, written
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchext.optim import KFAC, SPDKFAC, KFACPreconditioner

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_grad_scaler_in_front_of_another_optimizer(given: bool, unscales: bool, fused: bool) -> None:
    flats = []
    for scaled in (False, True):
        model = mlp().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        kfac = KFACPreconditioner(
            model, optimizer, grad_scaler=scaler if given else None, inverse_update_steps=1, damping=0.01
        )
        for step in range(5):
            bad = scaled and step == 2
            for overflow in (True, False) if bad else (False,):
                optimizer.zero_grad()
                inputs, targets = data(seed=step)
                loss = nn.functional.cross_entropy(model(inputs.float()), targets)
                scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                    if scaled and not given:
                        with pytest.raises(RuntimeError, match="grad_scaler=scaler to KFACPreconditioner"):
                            scaler.step(optimizer)
                        return
                scaler.step(optimizer)
                scaler.update()
        assert kfac.stats()["skipped"] == (1 if scaled else 0)
        flats.append(flat(model))
        kfac.remove()
        assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused
    same(flats[1], flats[0], 1e-4)


def test_grad_scaler() -> None:
    """The scale is taken out of G, whoever unscales; an overflow skips the step and leaves nothing behind."""
    results = []
    for how in ("none", "step unscales", "scaler.unscale_", "preconditioner"):
        model = mlp().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=how != "none")
        given = scaler if how in ("scaler.unscale_", "preconditioner") else None
        optimizer: torch.optim.Optimizer
        if how == "preconditioner":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            KFACPreconditioner(model, optimizer, grad_scaler=given, inverse_update_steps=2, damping=0.01)
        else:
            optimizer = KFAC(model, lr=0.1, grad_scaler=given, inverse_update_steps=2, damping=0.01)
        for step in range(6):
            optimizer.zero_grad()
            inputs, targets = data(seed=step)
            loss = nn.functional.cross_entropy(model(inputs.float()), targets)
            scaler.scale(loss).backward()
            if how == "scaler.unscale_":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
        results.append(flat(model))
    for result in results[1:]:
        same(result, results[0], 1e-4)


def test_grad_scaler_that_unscaled_must_be_given() -> None:
    model = mlp().float()
    optimizer, scaler = KFAC(model), torch.amp.GradScaler("cpu")
    inputs, targets = data()
    scaler.scale(nn.functional.cross_entropy(model(inputs.float()), targets)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="grad_scaler=scaler"):
        scaler.step(optimizer)


def test_an_overflow_under_a_grad_scaler_is_forgotten() -> None:
    models = [mlp().float(), mlp().float()]
    for model, overflow in zip(models, (False, True), strict=True):
        optimizer, scaler = KFAC(model, lr=0.1, inverse_update_steps=1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            for bad in (True, False) if overflow and step == 2 else (False,):
                optimizer.zero_grad()
                inputs, targets = data(seed=step)
                loss = nn.functional.cross_entropy(model(inputs.float()), targets) * (float("inf") if bad else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert optimizer.stats()["skipped"] == (1 if overflow else 0)
    same(flat(models[1]), flat(models[0]), 1e-5)


@pytest.mark.parametrize("where", ["input", "loss"])
def test_a_batch_with_nan_changes_nothing_and_is_counted(where: str) -> None:
    models = [mlp(), mlp()]
    optimizers: list[KFAC] = [KFAC(model, lr=0.1, inverse_update_steps=1) for model in models]
    for step in range(6):
        train(models[0], optimizers[0], 1, step)
        if step in (0, 3):
            before = flat(models[1])
            optimizers[1].zero_grad()
            inputs, targets = data()
            if where == "input":
                inputs[3, 2] = float("nan")
            loss = nn.functional.cross_entropy(models[1](inputs), targets)
            (loss * (float("inf") if where == "loss" else 1.0)).backward()
            optimizers[1].step()
            assert torch.equal(flat(models[1]), before)
        train(models[1], optimizers[1], 1, step)
    assert optimizers[1].stats()["skipped"] == 2
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_a_skipped_batch_in_front_of_another_optimizer() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    kfac = KFACPreconditioner(model, optimizer)
    train(model, optimizer, 2)
    before = flat(model)
    (model(data()[0]) * float("nan")).sum().backward()
    optimizer.step()
    assert torch.equal(flat(model), before)
    assert kfac.stats()["skipped"] == 1
    assert train(model, optimizer, 2)[-1] > 0


def test_sums_that_overflow_are_left_out() -> None:
    """Gradients that are finite, of inputs whose squares are not."""
    model = nn.Linear(2, 1, bias=False)
    kfac = KFACPreconditioner(model, inverse_update_steps=1)
    (model(torch.full((1, 2), 1e30)) * 1e-10).sum().backward()
    assert kfac.step()
    assert kfac.stats()["factors_left_out"] == 1
    assert bool(torch.isfinite(model.weight.grad).all())  # type: ignore[arg-type]


def test_damping_is_added_to_a_copy() -> None:
    model = mlp()
    optimizer = KFAC(model, lr=0.0, factor_decay=0.5, damping=10.0, inverse_update_steps=1)
    for _ in range(60):
        train(model, optimizer, 1, first=5)
    saved = optimizer.state_dict()["kfac"]["factors"]
    inputs, _ = data(seed=5)
    a = torch.cat([inputs, torch.ones(12, 1, dtype=torch.float64)], 1)
    expected = (a.T @ a / 12)[torch.triu_indices(7, 7).unbind()]
    same(saved[3][0], expected, 1e-9)  # factors: G and A of the last layer, then of the first


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


def test_an_embedding_tied_to_a_linear_keeps_its_gradient() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(5, 4), "mid": nn.Linear(4, 4), "out": nn.Linear(4, 5, bias=False)})
    model["out"].weight = model["in"].weight
    kfac = KFACPreconditioner(model)
    assert kfac.layers == ["mid"]
    model["out"](model["mid"](model["in"](torch.arange(5)))).sin().sum().backward()
    before = model["in"].weight.grad.clone()
    kfac.step()
    assert torch.equal(model["in"].weight.grad, before)


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


def test_autocast_to_bfloat16() -> None:
    """The forward pass is; factors and directions are not, even if backward() and step() are called inside."""
    flats = []
    for inside in (False, True):
        model = mlp().float()
        optimizer = KFAC(model, lr=0.1, inverse_update_steps=1)
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = data(seed=step)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs.float()), targets)
                if inside:
                    loss.backward()
                    optimizer.step()
            if not inside:
                loss.backward()
                optimizer.step()
        assert optimizer.stats()["steps"] == 3
        assert optimizer.stats()["factors_left_out"] == 0
        flats.append(flat(model))
    assert torch.equal(flats[0], flats[1])


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
