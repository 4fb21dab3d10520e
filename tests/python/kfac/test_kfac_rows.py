"""Directions made of the rows of a batch (``gather_rows``) beside those of the whole gradient: the same trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kfac_reference import same
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchext.optim import KFAC, KFACPreconditioner

OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.01, "inverse_update_steps": 4}
STEPS = 10  # of which 0, 4 and 8 make inverses
ROWS = 12


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 25, bias=False), nn.Tanh(), nn.Linear(25, 3)]
    return nn.Sequential(*layers).to(dtype)


def noise(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


Backward = Callable[[nn.Module, int], None]


def plain(model: nn.Module, step: int) -> None:
    loss_of(model(noise(step, ROWS, 20))).backward()


def train(
    rows: bool | None, make: Callable[[], nn.Module] = mlp, backward: Backward = plain, **options: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    """The parameters' way from their start, and the counters."""
    model = make()
    optimizer = KFAC(model, gather_rows=rows, **(OPTIONS | options))
    start = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return [p.detach() - before for p, before in zip(model.parameters(), start, strict=True)], optimizer.stats()


def agree(
    make: Callable[[], nn.Module] = mlp, backward: Backward = plain, tolerance: float = 1e-9, **options: Any
) -> tuple[int, int]:
    """How many directions were made of rows, and how many were refused to be."""
    expected, whole = train(False, make, backward, **options)
    found, stats = train(True, make, backward, **options)
    for one, other in zip(found, expected, strict=True):
        same(one, other, tolerance)
    assert whole["row_directions"] == whole["row_directions_refused"] == 0
    assert stats["clip"] == pytest.approx(whole["clip"], rel=max(1e-6, tolerance))
    assert stats["steps"] == STEPS
    return stats["row_directions"], stats["row_directions_refused"]


ALL = (3 * (STEPS - 3), 0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clip", [1e-3, 1e-7, None])
def test_the_training_is_the_same(clip: float | None, momentum: float) -> None:
    assert agree(kl_clip=clip, momentum=momentum) == ALL


@pytest.mark.parametrize("rows", [1, 17, 200])
def test_any_number_of_rows(rows: int) -> None:
    assert agree(backward=lambda model, step: loss_of(model(noise(step, rows, 20))).backward()) == ALL


@pytest.mark.parametrize("sequences", ["expand", "reduce"])
def test_sequences(sequences: str) -> None:
    def backward(model: nn.Module, step: int) -> None:
        loss_of(model(noise(step, 4, 3, 20))).backward()

    assert agree(backward=backward, sequences=sequences) == ALL


def test_a_single_sample_without_a_batch() -> None:
    assert agree(backward=lambda model, step: loss_of(model(noise(step, 20))).backward()) == ALL


def test_factors_that_are_seldom_updated() -> None:
    assert agree(factor_update_steps=2) == ALL


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("rows", [5, 40])
def test_in_float32(rows: int, precision: str) -> None:
    """Wide enough for the processor's tiles, where it has them; widths are no multiples of a block."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(70, 64), nn.Tanh(), nn.Linear(64, 45, bias=False), nn.Tanh(), nn.Linear(45, 3))

    def backward(model: nn.Module, step: int) -> None:
        loss_of(model(noise(step, rows, 70, dtype=torch.float32))).backward()

    assert agree(make, backward, tolerance=2e-4, direction_precision=precision) == ALL


class Twice(nn.Module):
    """Calls one layer twice, and another only in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 20)
        self.seldom = nn.Linear(20, 20)
        self.head = nn.Linear(20, 3)
        self.double()

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.first(inputs))))
        if step % 3 != 0:
            x = torch.tanh(self.seldom(x))
        return self.head(x)  # type: ignore[no-any-return]


def test_a_layer_called_twice_and_one_that_is_left_out() -> None:
    # `seldom` has no rows in step 0, and so none in steps 1 to 3; it has some in 4 and 8.
    def backward(model: nn.Module, step: int) -> None:
        loss_of(model(noise(step, ROWS, 20), step)).backward()

    assert agree(Twice, backward) == (2 * (STEPS - 3) + 2, 0)


def test_batches_of_other_sizes() -> None:
    """Fewer rows than the step before had; more have no place."""
    sizes = [12, 12, 5, 12, 12, 20, 1, 12, 12, 12]

    def backward(model: nn.Module, step: int) -> None:
        loss_of(model(noise(step, sizes[step], 20))).backward()

    assert agree(backward=backward) == (3 * (STEPS - 4), 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant: bool) -> None:
    def backward(model: nn.Module, step: int) -> None:
        assert isinstance(model, nn.Sequential)
        loss_of(checkpoint(model, noise(step, ROWS, 20).requires_grad_(), use_reentrant=reentrant)).backward()

    assert agree(backward=backward) == ALL


@pytest.mark.parametrize("to_none", [False, True])
def test_accumulated_gradients(to_none: bool) -> None:
    def backward(model: nn.Module, step: int) -> None:
        model.zero_grad(set_to_none=to_none)
        for part in noise(step, ROWS, 20).chunk(3):
            (loss_of(model(part)) / 3).backward()

    assert agree(backward=backward) == ALL


def test_a_step_that_never_came() -> None:
    """Its rows are dropped where the optimizer is told; where it is not, they are not those of the gradient."""

    def untold(model: nn.Module, step: int) -> None:
        if step in (1, 3):
            loss_of(model(noise(100 + step, ROWS, 20))).backward()
            model.zero_grad()  # not the optimizer's
        plain(model, step)

    assert agree(backward=untold, factor_update_steps=4) == (3 * (STEPS - 5), 6)
    made = []
    for rows in (False, True):
        model = mlp()
        optimizer = KFAC(model, gather_rows=rows, **OPTIONS)
        for step in range(STEPS):
            plain(model, 100 + step)
            optimizer.zero_grad()
            plain(model, step)
            optimizer.step()
        made.append([p.detach() for p in model.parameters()])
        assert optimizer.stats()["row_directions"] == (ALL[0] if rows else 0)
    for one, other in zip(*made, strict=True):
        same(one, other, 1e-9)


@pytest.mark.parametrize(
    ("frozen", "of_rows"), [("0.bias", ALL[0] - 3), ("0.weight", ALL[0] - 3), ("4.bias", ALL[0] - 3)]
)
def test_a_parameter_frozen_in_training(frozen: str, of_rows: int) -> None:
    def backward(model: nn.Module, step: int) -> None:
        model.get_parameter(frozen).requires_grad_(step not in (5, 6, 7))
        plain(model, step)

    made, refused = agree(backward=backward)
    assert made == of_rows
    assert refused == (3 if frozen.endswith("bias") else 0)  # a weight without a gradient has no direction


def test_a_scaler_and_a_clip_by_norm() -> None:
    """What multiplies all gradients alike leaves them what they are: those of the rows."""

    def run(rows: bool, unscaled: bool) -> tuple[list[Tensor], dict[str, Any]]:
        model = mlp(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        optimizer = KFAC(model, gather_rows=rows, grad_scaler=scaler, **OPTIONS)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(noise(step, ROWS, 20, dtype=torch.float32)))).backward()
            if unscaled:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()], optimizer.stats()

    for unscaled in (False, True):
        expected, _ = run(False, unscaled)
        found, stats = run(True, unscaled)
        for one, other in zip(found, expected, strict=True):
            same(one, other, 1e-5)
        assert (stats["row_directions"], stats["row_directions_refused"]) == ALL


def penalty(model: nn.Module, step: int) -> None:
    weight = model.get_parameter("2.weight")
    (loss_of(model(noise(step, ROWS, 20))) + 1e-7 * weight.square().sum()).backward()


def second_use(model: nn.Module, step: int) -> None:
    weight = model.get_parameter("2.weight")
    (loss_of(model(noise(step, ROWS, 20))) + loss_of(functional.linear(noise(step, 3, 30), weight))).backward()


def clipped_by_value(model: nn.Module, step: int) -> None:
    plain(model, step)
    gradient = model.get_parameter("2.weight").grad
    assert gradient is not None
    gradient.clamp_(-1e-3, 1e-3)


def decayed_by_hand(model: nn.Module, step: int) -> None:
    plain(model, step)
    weight = model.get_parameter("2.weight")
    assert weight.grad is not None
    weight.grad.add_(weight.detach(), alpha=1e-6)


def bias_by_hand(model: nn.Module, step: int) -> None:
    plain(model, step)
    gradient = model.get_parameter("0.bias").grad
    assert gradient is not None
    gradient.add_(1e-6)


def replaced(model: nn.Module, step: int) -> None:
    plain(model, step)
    weight = model.get_parameter("2.weight")
    weight.grad = noise(step, *weight.shape)


@pytest.mark.parametrize("backward", [penalty, second_use, clipped_by_value, decayed_by_hand, bias_by_hand, replaced])
def test_a_gradient_that_is_not_that_of_its_rows_is_taken_whole(backward: Backward) -> None:
    assert agree(backward=backward) == (2 * (STEPS - 3), STEPS - 3)


def test_a_layer_that_is_refused_again_and_again_is_left_alone() -> None:
    model = mlp()
    optimizer = KFAC(model, gather_rows=True, **OPTIONS)
    for step in range(24):
        optimizer.zero_grad()
        penalty(model, step)
        optimizer.step()
    # Layer 2 was tried in steps 1-3, 5-7, 9-11: eight and more when step 12 made inverses.
    stats = optimizer.stats()
    assert (stats["row_directions"], stats["row_directions_refused"]) == (2 * 18, 9)
    assert optimizer.plan().as_dict["row_layers"] == 2


def test_types_of_few_bits_are_taken_whole() -> None:
    """Their gradients are rounded to what is larger than a difference may be."""

    def autocast(model: nn.Module, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(noise(step, ROWS, 20, dtype=torch.float32))
        loss_of(output.float()).backward()

    assert agree(lambda: mlp(torch.float32), autocast, tolerance=1e-5) == (0, ALL[0])


def test_what_is_not_finite_is_skipped() -> None:
    model = mlp()
    optimizer = KFAC(model, gather_rows=True, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(model, step)
        if step in (2, 6):
            gradient = model.get_parameter("0.weight").grad
            assert gradient is not None
            gradient[3, 4] = float("nan") if step == 2 else float("inf")
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        changed = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert changed == (step not in (2, 6))
    stats = optimizer.stats()
    assert (stats["skipped"], stats["row_directions_refused"]) == (2, 0)


def test_large_gradients_whose_sums_overflow_are_finite() -> None:
    """The sum of a row's elements is infinite, none of them is."""
    torch.manual_seed(0)
    model = nn.Linear(40, 3)
    optimizer = KFAC(model, gather_rows=True, kl_clip=None, **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        model(noise(step, 4, 40, dtype=torch.float32)).sum().backward()
        if step == 2:
            assert model.weight.grad is not None
            model.weight.grad.fill_(3e38)
        optimizer.step()
    stats = optimizer.stats()
    assert (stats["steps"], stats["skipped"], stats["row_directions"], stats["row_directions_refused"]) == (3, 0, 1, 1)


def test_other_gradients_and_a_forward_pass_in_between() -> None:
    def backward(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model(noise(50 + step, 7, 20))
        inputs = noise(60 + step, 7, 20).requires_grad_()
        torch.autograd.grad(loss_of(model(inputs)), inputs)  # comes past the layers, and has none of their gradients
        plain(model, step)

    assert agree(backward=backward) == ALL


def test_a_state_that_is_loaded_between_backward_and_step() -> None:
    def run(rows: bool) -> tuple[list[Tensor], dict[str, Any]]:
        model = mlp()
        optimizer = KFAC(model, gather_rows=rows, **OPTIONS)
        state: Any = None
        for step in range(STEPS):
            optimizer.zero_grad()
            plain(model, step)
            if step == 5:
                optimizer.kfac.load_state_dict(state)
            optimizer.step()
            if step == 1:
                state = optimizer.kfac.state_dict()
        return [p.detach() for p in model.parameters()], optimizer.stats()

    (expected, _), (found, stats) = run(False), run(True)
    for one, other in zip(found, expected, strict=True):
        same(one, other, 1e-9)
    assert stats["row_directions"] > 0


def test_they_are_chosen_where_they_cost_less() -> None:
    def stats(width: int, rows: int, **options: Any) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
        optimizer = KFACPreconditioner(model, inverse_update_steps=4, **options)
        for step in range(3):
            model.zero_grad()
            loss_of(model(noise(step, rows, width, dtype=torch.float32))).backward()
            optimizer.step()
        return optimizer.stats()["row_directions"], optimizer.plan().as_dict["row_layers"]

    assert stats(600, 16) == (2, 1)  # the head is cheap as it is
    assert stats(600, 1200) == (0, 0)
    assert stats(16, 2) == (0, 0)
    assert stats(600, 16, gather_rows=False) == (0, 0)
    assert stats(16, 2, gather_rows=True) == (4, 2)
    assert stats(600, 16, method="eigen") == (0, 0)


def test_the_plan_says_so() -> None:
    model = mlp()
    optimizer = KFAC(model, gather_rows=True, **OPTIONS)
    assert "gathered rows" not in str(optimizer.plan())
    plain(model, 0)
    optimizer.step()
    assert "directions of 3 Linear layers are made of gathered rows" in str(optimizer.plan())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"method": "eigen"}, '^gather_rows = True: allowed with method="inverse" only'),
        ({"inverse_update_steps": 1}, "^gather_rows = True: allowed with inverse_update_steps above 1"),
        *(
            ({"strategy": strategy}, f'^gather_rows = True: .*strategy="{strategy}"')
            for strategy in ("mem-opt", "dp", "d-kfac")
        ),
    ],
)
def test_options_that_mean_nothing_beside_it(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KFAC(mlp(), gather_rows=True, **options)


def test_a_model_without_linear_layers() -> None:
    with pytest.raises(ValueError, match="gather_rows = True: allowed for models with Linear layers"):
        KFAC(nn.Conv1d(3, 3, 3), gather_rows=True)


def test_a_model_that_is_not_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="gather_rows = True: allowed for models on the CPU"):
        KFACPreconditioner(mlp(), gather_rows=True, _queued=True)  # as on CUDA
