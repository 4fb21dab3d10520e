"""K-FAC under GradScaler and autocast, and with numbers that are not finite, on both paths of the engine."""

from __future__ import annotations

import pytest
import torch
from kfac_models import data, flat, mlp, train
from kfac_reference import same
from torch import Tensor, nn

from torchext.optim import KFAC, KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")


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


def test_the_bias_of_a_weight_frozen_in_training_loses_the_scale() -> None:
    """It is what is left of its layer: a gradient like those outside the layers."""
    results = []
    for scaled in (False, True):
        model = mlp()
        optimizer = KFAC(model, lr=0.1, inverse_update_steps=1, damping=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = data(seed=step)
            scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            model[0].weight.requires_grad_(False)
            model[0].weight.grad = None
        results.append(flat(model))
    same(results[1], results[0], 1e-4)


def test_the_bias_of_a_weight_frozen_in_training_is_checked() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = KFAC(model, lr=0.1, inverse_update_steps=1)
    train(model, optimizer, 1)
    model[0].weight.requires_grad_(False)
    optimizer.zero_grad()
    model(data()[0]).sum().backward()
    model[0].bias.grad[3] = float("nan")
    before = flat(model)
    optimizer.step()
    assert torch.equal(flat(model), before)
    assert optimizer.stats()["skipped"] == 1


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


def packed_gram(samples: Tensor) -> Tensor:
    """The triangle, row by row, of (1/N) sum x x^T in float64."""
    full = samples.double().t() @ samples.double() / len(samples)
    return torch.cat([row[i:] for i, row in enumerate(full)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 33, 300])
def test_factors_are_right_to_all_bits_of_a_float(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 70, generator=generator) * torch.randn(70, generator=generator).exp()
    model = nn.Linear(70, 40, bias=bias)
    kfac = KFACPreconditioner(model, factor_decay=0.0)
    gradients = torch.randn(rows, 40, generator=generator)
    model(inputs).backward(gradients / rows)
    kfac.step()
    of_outputs, of_inputs = (factor[0] for factor in kfac.state_dict()["factors"])
    ones = torch.ones(rows, 1 if bias else 0)
    for found, samples in ((of_inputs, torch.cat([inputs, ones], 1)), (of_outputs, gradients)):
        exact = packed_gram(samples)
        magnitude = packed_gram(samples.abs())  # of the terms: what float's rounding is measured by
        assert ((found - exact).abs() <= (rows + 8) * 2.0**-24 * magnitude).all()
