"""K-FAC beside hooks of others: it sees what the layer's weight sees, whatever they change, and whoever came first.

The reference has no hooks. It computes in plain functions what they do, and the gradient at the layer's own output by
vector-Jacobian products from one to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kfac_reference import direction, factors, same, samples, written
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from torchext.optim import KFACPreconditioner

# Hooks find the same tensors on both paths of the engine.

KINDS = ["linear", "sequence", "unbiased", "convolution", "embedding"]


def make(kind: str) -> tuple[nn.Module, Tensor]:
    """A layer, and its input."""
    torch.manual_seed(0)
    if kind == "embedding":
        return nn.Embedding(7, 4).double(), torch.tensor([[0, 3, 3], [5, 6, 1]])
    if kind == "convolution":
        return nn.Conv2d(2, 3, 3, padding=1).double(), torch.randn(4, 2, 5, 5, dtype=torch.float64)
    shape = (5, 4) if kind == "linear" else (5, 3, 4)
    return nn.Linear(4, 3, bias=kind != "unbiased").double(), torch.randn(*shape, dtype=torch.float64)


def operation(layer: Any, inputs: Tensor) -> Tensor:
    if isinstance(layer, nn.Embedding):
        return functional.embedding(inputs, layer.weight)
    if isinstance(layer, nn.Conv2d):
        return functional.conv2d(inputs, layer.weight, layer.bias, padding=1)
    return functional.linear(inputs, layer.weight, layer.bias)


def other_input(inputs: Tensor) -> Tensor:
    return inputs * inputs.abs() - 0.5 if inputs.is_floating_point() else (inputs + 2) % 7


def other_output(output: Tensor) -> Tensor:
    return (1.5 * output).tanh() + 0.25 * output.square()


def changed(gradient: Tensor) -> Tensor:
    return gradient * torch.linspace(0.25, 2.0, gradient.numel(), dtype=gradient.dtype).reshape(gradient.shape)


def loss_of(output: Tensor) -> Tensor:
    return (output.sin() * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)).sum()


def on_output(layer: nn.Module, hook: Callable[[Tensor], Any]) -> Any:
    return layer.register_forward_hook(lambda module, args, output: hook(output))


def hook_node(output: Tensor) -> None:
    assert output.grad_fn is not None
    output.grad_fn.register_prehook(lambda gradients: (changed(gradients[0]),))


def hook_gradient(output: Tensor) -> None:
    if output.requires_grad:  # a reentrant checkpoint runs without gradients first
        output.register_hook(changed)


def on_gradient(layer: nn.Module) -> Any:
    return on_output(layer, hook_gradient)


@dataclass(frozen=True)
class Case:
    """Hooks of others, in the order of their registration, and what they come to."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    input: bool = False
    weight: bool = False
    # What is done to the output, in this order: "output" replaces it, "gradient" changes what comes back to it.
    stages: tuple[str, ...] = ()


CASES = {
    "input before": Case(before=("input",), input=True),
    "input after": Case(after=("input",), input=True),
    "output before": Case(before=("output",), stages=("output",)),
    "output after": Case(after=("output",), stages=("output",)),
    "output in a tuple": Case(before=("tuple",)),
    "in place": Case(after=("in place",), stages=("relu",)),
    "tensor hook before": Case(before=("gradient",), stages=("gradient",)),
    "tensor hook after": Case(after=("gradient",), stages=("gradient",)),
    "node hook after": Case(after=("node",), stages=("gradient",)),
    "full backward hook before": Case(before=("backward",)),
    "full backward hook after": Case(after=("backward",)),
    "full backward pre-hook before": Case(before=("backward_pre",), stages=("gradient",)),
    "full backward pre-hook after": Case(after=("backward_pre",), stages=("gradient",)),
    "weight": Case(after=("weight",), weight=True),
    "weight before": Case(before=("weight",), weight=True),
    "global input": Case(before=("global input",), input=True),
    "global output": Case(before=("global output",), stages=("output",)),
    "all": Case(
        before=("global output", "gradient", "output", "input"),
        after=("gradient", "output", "gradient", "backward_pre", "backward", "weight"),
        input=True,
        weight=True,
        stages=("output", "gradient", "output", "gradient", "output", "gradient", "gradient"),
    ),
}


def install(layer: Any, name: str) -> Any:
    def of_this(module: nn.Module, result: Any) -> Any:
        return result if module is layer else None

    if name == "input":
        return layer.register_forward_pre_hook(lambda module, args: other_input(args[0]))
    if name == "output":
        return on_output(layer, other_output)
    if name == "tuple":
        return on_output(layer, lambda output: (output, {"also": output.detach()}))
    if name == "in place":
        return on_output(layer, lambda output: output.relu_())
    if name == "gradient":
        return on_gradient(layer)
    if name == "node":
        return on_output(layer, hook_node)
    if name == "backward":
        return layer.register_full_backward_hook(
            lambda module, grad_inputs, grad_outputs: tuple(None if g is None else changed(g) for g in grad_inputs)
        )
    if name == "backward_pre":
        return layer.register_full_backward_pre_hook(lambda module, grad_outputs: (changed(grad_outputs[0]),))
    if name == "weight":
        return layer.weight.register_hook(changed)
    if name == "global input":
        return modules.register_module_forward_pre_hook(
            lambda module, args: of_this(module, other_input(args[0]) if module is layer else None)
        )
    assert name == "global output"
    return modules.register_module_forward_hook(
        lambda module, args, output: of_this(module, other_output(output) if module is layer else None)
    )


@contextlib.contextmanager
def preconditioned(layer: nn.Module, case: Case, **options: Any) -> Iterator[KFACPreconditioner]:
    handles = [install(layer, name) for name in case.before]
    kfac = KFACPreconditioner(layer, inverse_update_steps=1, kl_clip=None, **options)
    handles += [install(layer, name) for name in case.after]
    try:
        yield kfac
    finally:
        for handle in handles:
            handle.remove()
        kfac.remove()


def expected(layer: Any, inputs: Tensor, case: Case) -> Tensor:
    """K-FAC's first direction."""
    seen = other_input(inputs) if case.input else inputs
    values = [operation(layer, seen)]
    for stage in case.stages:
        function = {"output": other_output, "relu": torch.relu, "gradient": lambda value: value * 1.0}[stage]
        values.append(function(values[-1]))
    (back,) = torch.autograd.grad(loss_of(values[-1]), values[-1], retain_graph=True)
    for stage, value, result in reversed(list(zip(case.stages, values, values[1:], strict=False))):
        if stage == "gradient":
            back = changed(back)
        else:
            (back,) = torch.autograd.grad(result, value, back, retain_graph=True)
    parameters = list(layer.parameters())
    weight, *bias = torch.autograd.grad(values[0], parameters, back)
    if case.weight:
        weight = changed(weight)
    grad = weight.T if isinstance(layer, nn.Embedding) else weight.flatten(1)
    grad = torch.cat([grad, *(one[:, None] for one in bias)], 1)
    ((a, g, count, positions),) = samples(layer, seen, back)
    new_a, new_g = factors(a, g, count, positions)
    running = [0.95 * torch.eye(new.shape[0], dtype=new.dtype) + 0.05 * new for new in (new_a, new_g)]
    return direction(grad, running[0], running[1], 0.003, "inverse")


def run(layer: nn.Module, inputs: Tensor) -> Tensor:
    output = layer(inputs)
    return loss_of(output[0] if isinstance(output, tuple) else output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_hooks_of_others(kind: str, name: str) -> None:
    case = CASES[name]
    layer, inputs = make(kind)
    wanted = expected(layer, inputs, case)
    if inputs.is_floating_point():
        inputs.requires_grad_(True)
    with preconditioned(layer, case) as kfac:
        run(layer, inputs).backward()
        kfac.step()
    same(written(layer), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["input after", "output before", "tensor hook after", "full backward pre-hook after"])
def test_hooks_of_others_in_a_checkpoint(kind: str, name: str, reentrant: bool) -> None:
    case = CASES[name]
    layer, inputs = make(kind)
    wanted = expected(layer, inputs, case)
    anchor = torch.zeros(1, dtype=torch.float64, requires_grad=True)  # so that a reentrant one has a gradient to go to

    def part(anchor: Tensor, inputs: Tensor) -> Any:
        return layer(inputs if reentrant or not inputs.is_floating_point() else inputs + 0 * anchor)

    with preconditioned(layer, case) as kfac:
        loss_of(checkpoint(part, anchor, inputs, use_reentrant=reentrant)).backward()
        kfac.step()
    same(written(layer), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_cuts_the_output_off_leaves_no_trace(kind: str) -> None:
    """Its weight has no gradient of that call; that of the call before counts once."""
    layer, inputs = make(kind)
    wanted = expected(layer, inputs, Case())
    with preconditioned(layer, Case()) as kfac:
        loss = run(layer, inputs)
        first = layer(inputs)
        with contextlib.closing(_Closing(on_output(layer, lambda output: output.detach() + 0 * first))):
            layer(other_input(inputs))
        loss.backward()
        kfac.step()
    same(written(layer), wanted)


class _Closing:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


def test_two_preconditioners_see_one_call_each() -> None:
    layer, inputs = make("linear")
    wanted = expected(layer, inputs, Case())
    with preconditioned(layer, Case()) as kfac, preconditioned(layer, Case()) as other:
        run(layer, inputs).backward()
        plain = [parameter.grad.clone() for parameter in layer.parameters()]  # type: ignore[union-attr]
        kfac.step()
        same(written(layer), wanted)
        for parameter, gradient in zip(layer.parameters(), plain, strict=True):
            parameter.grad = gradient
        other.step()
    same(written(layer), wanted)


@pytest.mark.parametrize("hooks", [("backward",), ("gradient",), ("output", "gradient")])
def test_the_layer_before_one_with_hooks(hooks: tuple[str, ...]) -> None:
    """What hooks of the second layer make of the gradient at its input is what the first one gets."""
    directions = []
    for by_hooks in (True, False):
        first, inputs = make("linear")
        torch.manual_seed(1)
        second = nn.Linear(3, 2).double()
        model = nn.Sequential(first, second)
        kfac = KFACPreconditioner(model, inverse_update_steps=1, kl_clip=None)
        between = first(inputs)
        if by_hooks:
            for name in hooks:
                install(second, name)
            loss_of(second(between)).backward()
        else:
            start = between.detach().requires_grad_(True)
            own = second(start)
            output = other_output(own) if "output" in hooks else own
            (back,) = torch.autograd.grad(loss_of(output), output, retain_graph=True)
            output.backward(changed(back) if "gradient" in hooks else back)
            assert start.grad is not None
            between.backward(changed(start.grad) if "backward" in hooks else start.grad)
        kfac.step()
        directions.append([written(first), written(second)])
    for found, wanted in zip(*directions, strict=True):
        same(found, wanted, 1e-12)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding"])
def test_a_parametrized_layer_is_left_alone_or_refused(kind: str, name: str) -> None:
    layer, inputs = make(kind)
    if not hasattr(layer, name):
        return
    model = nn.ModuleDict({"odd": layer, "plain": nn.Linear(3, 3).double()})
    kfac = KFACPreconditioner(model)
    parametrize.register_parametrization(layer, name, Doubled())
    with pytest.raises(ValueError, match=rf"odd: its {name} has been parametrized .* skip_layers"):
        layer(inputs)
    kfac.remove()
    if name == "weight":
        before = KFACPreconditioner(model)
        assert before.layers == ["plain"]
        loss_of(layer(inputs)).backward()
        before.step()


def test_a_subclass_that_reshapes_its_output_is_taken() -> None:
    class Halved(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows).unflatten(-1, (2, -1)).transpose(1, 2)

    torch.manual_seed(0)
    layer = Halved(4, 6).double()
    inputs = torch.randn(5, 4, dtype=torch.float64)
    own = functional.linear(inputs, layer.weight, layer.bias)
    (back,) = torch.autograd.grad(loss_of(own.unflatten(-1, (2, -1)).transpose(1, 2)), own, retain_graph=True)
    weight, bias = torch.autograd.grad(own, list(layer.parameters()), back)
    ((a, g, count, positions),) = samples(layer, inputs, back)
    running = [0.95 * torch.eye(new.shape[0], dtype=new.dtype) + 0.05 * new for new in factors(a, g, count, positions)]
    wanted = direction(torch.cat([weight, bias[:, None]], 1), running[0], running[1], 0.003, "inverse")
    with preconditioned(layer, Case()) as kfac:
        loss_of(layer(inputs)).backward()
        kfac.step()
    same(written(layer), wanted)
