"""Directions made inside the backward pass (``early_directions``) beside those made after it: the same trainings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kfac_reference import same
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchext.optim import KFAC, KFACPreconditioner

pytestmark = pytest.mark.usefixtures("path")

OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.01, "inverse_update_steps": 4}
STEPS = 10


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
    loss_of(model(noise(step, 12, 20))).backward()


def train(
    early: bool, make: Callable[[], nn.Module] = mlp, backward: Backward = plain, **options: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    """The parameters' way from their start, and the counters."""
    model = make()
    optimizer = KFAC(model, early_directions=early, **(OPTIONS | options))
    start = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return [p.detach() - before for p, before in zip(model.parameters(), start, strict=True)], optimizer.stats()


def agree(
    make: Callable[[], nn.Module] = mlp, backward: Backward = plain, tolerance: float = 1e-9, **options: Any
) -> dict[str, Any]:
    expected, late = train(False, make, backward, **options)
    found, stats = train(True, make, backward, **options)
    for one, other in zip(found, expected, strict=True):
        same(one, other, tolerance)
    assert late["early_directions"] == 0
    assert stats["early_directions"] > 0
    assert stats["clip"] == pytest.approx(late["clip"], rel=max(1e-3, tolerance))
    return stats


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clip", [1e-3, 1e-7, None])
def test_the_training_is_the_same(clip: float | None, momentum: float) -> None:
    stats = agree(kl_clip=clip, momentum=momentum)
    assert (stats["clip"] < 1) == (clip is not None)
    # Three layers, in all steps but 0, 4 and 8.
    assert stats["early_directions"] == 3 * (STEPS - 3)


@pytest.mark.parametrize("rows", [1, 17, 200])
def test_any_number_of_rows(rows: int) -> None:
    agree(backward=lambda model, step: loss_of(model(noise(step, rows, 20))).backward())


@pytest.mark.parametrize("sequences", ["expand", "reduce"])
def test_sequences(sequences: str) -> None:
    agree(backward=lambda model, step: loss_of(model(noise(step, 4, 3, 20))).backward(), sequences=sequences)


def test_factors_that_are_seldom_updated() -> None:
    agree(factor_update_steps=2)


def test_in_float32() -> None:
    agree(
        make=lambda: mlp(torch.float32),
        backward=lambda model, step: loss_of(model(noise(step, 12, 20, dtype=torch.float32))).backward(),
        tolerance=1e-4,
    )


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
    agree(Twice, lambda model, step: loss_of(model(noise(step, 12, 20), step)).backward())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant: bool) -> None:
    def backward(model: nn.Module, step: int) -> None:
        assert isinstance(model, nn.Sequential)
        inputs = noise(step, 12, 20).requires_grad_()
        loss_of(checkpoint(model, inputs, use_reentrant=reentrant)).backward()

    agree(backward=backward)


@pytest.mark.parametrize("to_none", [False, True])
def test_accumulated_gradients(to_none: bool) -> None:
    def backward(model: nn.Module, step: int) -> None:
        model.zero_grad(set_to_none=to_none)
        for part in noise(step, 12, 20).chunk(3):
            (loss_of(model(part)) / 3).backward()

    agree(backward=backward)


def test_a_step_that_never_came_is_forgotten() -> None:
    def backward(model: nn.Module, step: int) -> None:
        if step % 2 == 1:
            loss_of(model(noise(100 + step, 12, 20))).backward()
            model.zero_grad()  # not the optimizer's, which would tell K-FAC
        plain(model, step)

    agree(backward=backward, factor_update_steps=4)  # whose factors are of other steps


@pytest.mark.parametrize("frozen", ["0.bias", "0.weight", "4.bias"])
def test_a_parameter_frozen_in_training(frozen: str) -> None:
    def backward(model: nn.Module, step: int) -> None:
        model.get_parameter(frozen).requires_grad_(step not in (5, 6, 8))
        plain(model, step)

    agree(backward=backward)


class Mixed(nn.Module):
    """Layers of all kinds; only the Linear ones are early."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(9, 6)
        self.conv = nn.Conv1d(6, 8, 3)
        self.norm = nn.LayerNorm(24)
        self.hidden = nn.Linear(24, 16)
        self.head = nn.Linear(16, 3)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.conv(self.tokens(tokens).transpose(1, 2))).flatten(1)
        return self.head(torch.tanh(self.hidden(self.norm(x))))  # type: ignore[no-any-return]


def test_beside_other_layers() -> None:
    def backward(model: nn.Module, step: int) -> None:
        tokens = torch.randint(0, 9, (14, 5), generator=torch.Generator().manual_seed(step))
        loss_of(model(tokens)).backward()

    stats = agree(Mixed, backward)
    assert stats["early_directions"] == 2 * (STEPS - 3)


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradient_scaler(unscaled: bool) -> None:
    def run(early: bool) -> list[Tensor]:
        model = mlp(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        optimizer = KFAC(model, early_directions=early, grad_scaler=scaler, **OPTIONS)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(noise(step, 12, 20, dtype=torch.float32)))).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.stats()["steps"] == STEPS
        return [p.detach() for p in model.parameters()]

    for one, other in zip(run(True), run(False), strict=True):
        same(one, other, 1e-5)


def test_autocast() -> None:
    def backward(model: nn.Module, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(noise(step, 12, 20, dtype=torch.float32))
        loss_of(output.float()).backward()

    agree(lambda: mlp(torch.float32), backward, tolerance=3e-2)


def test_parameters_of_sixteen_bits() -> None:
    def backward(model: nn.Module, step: int) -> None:
        loss_of(model(noise(step, 12, 20, dtype=torch.bfloat16)).float()).backward()

    agree(lambda: mlp(torch.bfloat16), backward, tolerance=0.15)  # of steps that are some units in the last place


def test_a_closure() -> None:
    def run(early: bool) -> list[Tensor]:
        model = mlp()
        optimizer = KFAC(model, early_directions=early, **OPTIONS)

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model(noise(next(steps), 12, 20)))
            loss.backward()
            return float(loss.detach())

        steps = itertools.count()
        for _ in range(STEPS):
            optimizer.step(closure)
        return [p.detach() for p in model.parameters()]

    for one, other in zip(run(True), run(False), strict=True):
        same(one, other, 1e-9)


def prepared(steps: int = 2, **options: Any) -> tuple[nn.Sequential, KFAC]:
    """A model and its optimizer after some steps."""
    model = mlp()
    optimizer = KFAC(model, early_directions=True, **(OPTIONS | options))
    for step in range(steps):
        optimizer.zero_grad()
        plain(model, step)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def plain_gradients(model: nn.Module, step: int) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(model(noise(step, 12, 20))), list(model.parameters())))


def test_the_gradient_is_the_direction_from_backward_on() -> None:
    model, optimizer = prepared(kl_clip=None)
    plain(model, 2)
    found = gradients(model)
    optimizer.step()
    for one, other in zip(found, gradients(model), strict=True):
        assert torch.equal(one, other)  # step() has left it
    inverse = {
        (layer["layer"], layer["side"]): matrix[0]
        for layer, (_, matrix, _) in zip(
            optimizer.plan().as_dict["factors"], optimizer.kfac._engine.state(), strict=True
        )
    }
    twin, other_optimizer = prepared(kl_clip=None)
    del other_optimizer
    weight, bias = plain_gradients(twin, 2)[:2]
    expected = inverse["0", "G"] @ torch.cat([weight, bias.unsqueeze(1)], 1) @ inverse["0", "A"]
    same(found[0], expected[:, :-1], 1e-10)
    same(found[1], expected[:, -1], 1e-10)


@pytest.mark.parametrize("steps", [0, 4])
def test_steps_that_make_inverses_leave_gradients_to_the_step(steps: int) -> None:
    model, optimizer = prepared(steps)
    plain(model, steps)
    for one, other in zip(gradients(model), plain_gradients(model, steps), strict=True):
        assert torch.equal(one, other)
    optimizer.step()


def test_gradients_for_a_caller_are_gradients() -> None:
    model, optimizer = prepared()
    found = plain_gradients(model, 2)
    optimizer.kfac.remove()
    for one, other in zip(found, plain_gradients(model, 2), strict=True):
        assert torch.equal(one, other)


def test_removed_it_leaves_gradients_alone() -> None:
    model, optimizer = prepared()
    optimizer.kfac.remove()
    optimizer.kfac.remove()
    plain(model, 2)
    for one, other in zip(gradients(model), plain_gradients(model, 2), strict=True):
        assert torch.equal(one, other)


def test_a_preconditioner_that_is_gone_leaves_gradients_alone() -> None:
    model = mlp()
    kfac = KFACPreconditioner(model, early_directions=True, inverse_update_steps=4)
    plain(model, 0)
    assert kfac.step(lr=0.1)
    model.zero_grad()
    del kfac
    plain(model, 1)
    for one, other in zip(gradients(model), plain_gradients(model, 1), strict=True):
        assert torch.equal(one, other)


def penalty(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Losses that are not made of the layers' calls alone, and the layer that each is about."""
    first, _, _, _, last = model.children()
    yield "0", 1e-4 * first.weight.square().sum()
    yield "0", 1e-4 * first.bias.square().sum()
    yield "4", functional.linear(noise(50, 12, 25), last.weight).mean()


@pytest.mark.parametrize("which", range(3))
def test_what_would_be_left_out_is_refused(which: int) -> None:
    model, optimizer = prepared()
    before = [p.detach().clone() for p in model.parameters()]
    name, extra = list(penalty(model))[which]
    (loss_of(model(noise(2, 12, 20))) + extra).backward()
    with pytest.raises(ValueError, match=rf"gradients of {name} are not those of its calls: a penalty .* skip_layers"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    # It goes on as if that step had never been.
    expected_model, expected = prepared()
    for m, o in ((model, optimizer), (expected_model, expected)):
        o.zero_grad()
        plain(m, 2)
        o.step()
    for one, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_layer_that_is_left_to_the_plain_gradient_may_have_a_penalty() -> None:
    def backward(model: nn.Module, step: int) -> None:
        assert isinstance(model, nn.Sequential)
        (loss_of(model(noise(step, 12, 20))) + 1e-2 * model[0].weight.square().sum()).backward()

    agree(backward=backward, skip_layers=["0"])


def test_gradients_by_hand_are_refused() -> None:
    model, optimizer = prepared()
    for p, gradient in zip(model.parameters(), plain_gradients(model, 2), strict=True):
        p.grad = gradient
    with pytest.raises(ValueError, match=r"gradients that no backward\(\) has put into \.grad"):
        optimizer.step()
    assert optimizer.stats()["steps"] == 2


def test_a_graph_of_the_backward_pass_is_refused() -> None:
    model, _ = prepared()
    with pytest.raises(ValueError, match="create_graph=True"):
        loss_of(model(noise(2, 12, 20))).backward(create_graph=True)


def test_a_batch_that_is_not_finite_is_skipped() -> None:
    model, optimizer = prepared()
    before = [p.detach().clone() for p in model.parameters()]
    inputs = noise(2, 12, 20)
    inputs[3, 4] = float("nan")
    loss_of(model(inputs)).backward()
    optimizer.step()
    assert optimizer.stats()["skipped"] == 1
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_an_empty_batch() -> None:
    model, optimizer = prepared(weight_decay=0.0, momentum=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    (model(noise(2, 0, 20)) - 1).square().sum().backward()
    optimizer.step()
    assert optimizer.stats()["skipped"] == 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_plan_says_so() -> None:
    _, optimizer = prepared()
    assert optimizer.plan().as_dict["early_directions"]
    assert "directions of Linear layers are made in the backward pass" in str(optimizer.plan())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eigen"}, '^early_directions = True: allowed with method="inverse" only'),
        ({"inverse_update_steps": 1}, "^early_directions = True: allowed with inverse_update_steps above 1"),
        *(
            ({"strategy": strategy}, f'^early_directions = True: .*strategy="{strategy}" leaves them')
            for strategy in ("mem-opt", "hybrid", "dp")
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFAC(mlp(), early_directions=True, **options)


def test_a_model_without_linear_layers() -> None:
    with pytest.raises(ValueError, match="early_directions = True: allowed for models with Linear layers"):
        KFAC(nn.Conv1d(3, 3, 3), early_directions=True)
