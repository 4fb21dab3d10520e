"""The optimizer's surface, and every case in which public K-FAC code crashes or is silently wrong."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from kfac_reference import Reference, same, written
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchext.errors import KFACStateError, NoSupportedLayerError
from torchext.optim import KFAC, PADKFAC, SPDKFAC, KFACPreconditioner


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(rows: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 6, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (rows,), generator=generator),
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        inputs, targets = data(seed=step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


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


def test_autocast_to_bfloat16() -> None:
    model = mlp().float()
    optimizer = KFAC(model, lr=0.1, inverse_update_steps=1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = data(seed=step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs.float()), targets)
        loss.backward()
        optimizer.step()
    assert optimizer.stats()["steps"] == 3
    assert optimizer.stats()["factors_left_out"] == 0


def test_torch_compile() -> None:
    models = [mlp(), mlp()]
    optimizers = [KFAC(model, lr=0.1, inverse_update_steps=2) for model in models]
    compiled = torch.compile(models[1], backend="eager")
    train(models[0], optimizers[0], 4)
    train(compiled, optimizers[1], 4)  # type: ignore[arg-type]
    assert optimizers[1].stats()["factor_updates"] == 4
    same(flat(models[1]), flat(models[0]), 1e-9)


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


def test_kl_clip_none_and_its_bound() -> None:
    for kappa in (None, 1e-6, 1e9):
        model = mlp()
        optimizer = KFAC(model, lr=0.1, kl_clip=kappa)
        train(model, optimizer, 1)
        clip = optimizer.stats()["clip"]
        assert clip < 1 if kappa == 1e-6 else clip == 1
    optimizer.kfac.kl_clip = None
    assert optimizer.kfac.kl_clip is None


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_state_dict_resumes_exactly(method: str) -> None:
    models = [mlp(), mlp()]
    options: dict[str, Any] = {"lr": 0.1, "inverse_update_steps": 4, "method": method}
    whole, first = SPDKFAC(models[0], **options), SPDKFAC(models[1], **options)
    train(models[0], whole, 9)
    train(models[1], first, 6)  # between two updates of the inverses
    file = io.BytesIO()
    torch.save({"model": models[1].state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model = mlp()
    resumed_model.load_state_dict(saved["model"])
    resumed = SPDKFAC(resumed_model, **options)
    resumed.load_state_dict(saved["optimizer"])
    train(resumed_model, resumed, 3, first=6)
    assert torch.equal(flat(resumed_model), flat(models[0]))


def test_state_of_another_model_is_refused_and_nothing_is_loaded() -> None:
    model, other = mlp(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer, others = KFAC(model), KFAC(other)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KFACStateError, match=r"another model: it has layer \('2', \[4, 8\], True\)"):
        optimizer.load_state_dict(others.state_dict())
    with pytest.raises(KFACStateError, match='no "kfac"'):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=1).state_dict())
    with pytest.raises(KFACStateError, match='method="eigen"'):
        optimizer.load_state_dict(KFAC(mlp(), method="eigen").state_dict())
    with pytest.raises(KFACStateError, match="1 layers, the model has 2"):
        optimizer.load_state_dict(KFAC(mlp(), skip_layers=["2"]).state_dict())
    after = optimizer.state_dict()
    assert after["state"].keys() == before["state"].keys()
    assert all(
        torch.equal(a[0], b[0]) for a, b in zip(after["kfac"]["factors"], before["kfac"]["factors"], strict=True)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping = 0: allowed above 0"),
        ({"damping": float("nan")}, "damping = nan: allowed above 0"),
        ({"factor_decay": 1.0}, r"factor_decay = 1: allowed \[0, 1\)"),
        ({"factor_decay": -0.1}, "factor_decay = -0.1"),
        ({"kl_clip": 0.0}, "kl_clip = 0: allowed above 0"),
        ({"factor_update_steps": 0}, "factor_update_steps = 0: allowed 1 or more"),
        ({"inverse_update_steps": 0}, "inverse_update_steps = 0: allowed a multiple"),
        ({"inverse_update_steps": 5, "factor_update_steps": 2}, "a multiple of factor_update_steps = 2"),
        ({"method": "lu"}, 'method = "lu": allowed inverse, eigen'),
        ({"strategy": "kaisa"}, 'strategy = "kaisa": allowed spd, pad'),
        ({"worker_fraction": 0.0}, "worker_fraction = 0: allowed above 0, up to 1"),
        ({"factor_scaling": "x"}, 'factor_scaling = "x": allowed kfc, kfac-pytorch'),
        ({"sequences": "sum"}, 'sequences = "sum": allowed expand, reduce'),
        ({"max_run_mb": 0.0}, "max_run_mb = 0: allowed above 0"),
        ({"lr": -1.0}, "lr = -1.0: allowed 0 or more"),
        ({"momentum": 1.0}, r"momentum = 1.0: allowed \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov = True: allowed with momentum above 0"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFAC(mlp(), **options)


def test_attributes_are_checked_too() -> None:
    kfac = KFACPreconditioner(mlp())
    with pytest.raises(ValueError, match="damping = -1"):
        kfac.damping = -1.0
    assert kfac.damping == 0.003
    kfac.damping = 0.1
    assert kfac.damping == 0.1


def test_a_model_without_a_supported_layer() -> None:
    with pytest.raises(NoSupportedLayerError, match="no Linear, Conv"):
        KFAC(nn.Sequential(nn.LayerNorm(4)))
    with pytest.raises(NoSupportedLayerError, match="skip_layers"):
        KFAC(mlp(), skip_layers=[".*"])


def test_other_parameters_keep_their_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    kfac = KFACPreconditioner(model)
    model(data()[0]).sin().sum().backward()
    before = model[1].weight.grad.clone()
    kfac.step()
    assert torch.equal(model[1].weight.grad, before)


def test_copies_and_pickles_of_the_model_are_plain_models() -> None:
    model = mlp()
    optimizer = KFAC(model, lr=0.1)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    train(model, optimizer, 1)
    for other in (twin, loaded):
        nn.functional.cross_entropy(other(data()[0]), data()[1]).backward()
    before = optimizer.state_dict()["kfac"]["factors"]
    optimizer.step()
    after = optimizer.state_dict()["kfac"]["factors"]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True))


def test_remove_takes_all_hooks_away() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFACPreconditioner(model, optimizer)
    kfac.remove()
    twin = mlp()
    train(model, optimizer, 2)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 2)
    assert torch.equal(flat(model), flat(twin))
    assert kfac.stats()["steps"] == 0


def test_the_plan_prints() -> None:
    model = mlp()
    optimizer = KFAC(model)
    train(model, optimizer, 2)
    text = str(optimizer.plan())
    assert "strategy spd, 1 rank(s)" in text
    assert "A 9" in text
    assert "predicted; measured" in text
