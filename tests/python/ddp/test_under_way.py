"""Tensors under way: what waits for them and what does not; without processes or native code."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchext", reason="torchext is not installed")

from torchext.ddp.under_way import Arrivals, UnderWay, own_gradient


class Waits(Arrivals):
    """Has a model's tensors arrive with their final values when they are waited for, and notes which."""

    def __init__(self, module: nn.Module) -> None:
        named = [
            *module.named_parameters(),
            *((name, b) for name, b in module.named_buffers() if b.is_floating_point()),
        ]
        super().__init__([tensor for _, tensor in named])
        self.names = [name for name, _ in named]
        self.final = [tensor.detach().clone() for _, tensor in named]
        self.seen: list[str] = []
        self.start()

    def start(self) -> None:
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.fill_(float("nan"))
        self.seen.clear()
        self.expect_all()

    def arrive_all(self, positions: Sequence[int]) -> None:
        self.seen += [self.names[position] for position in positions]
        self.settle(positions)
        with torch.no_grad():
            for position in positions:
                self._tensors[position].copy_(self.final[position])

    def under_way(self) -> set[str]:
        return {name for name, tensor in zip(self.names, self._tensors, strict=True) if isinstance(tensor, UnderWay)}


class Attending(nn.Module):
    """MultiheadAttention reads the weights of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.memory = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x[0])[None]
        x = self.memory(self.attention(x, x, x, need_weights=False)[0])[0]
        return self.head(x)


@pytest.fixture
def model() -> Attending:
    torch.manual_seed(0)
    return Attending()


def test_a_forward_pass_waits_for_what_it_uses(model: Attending) -> None:
    inputs = torch.rand(1, 3, 4)
    expected = copy.deepcopy(model)(inputs)
    waits = Waits(model)
    assert torch.equal(model(inputs), expected)
    assert waits.under_way() == {"unused.weight", "unused.bias"}
    order = [waits.seen.index(name) for name in ("norm.weight", "attention.in_proj_weight", "head.bias")]
    assert order == sorted(order)
    assert len(waits.seen) == len(set(waits.seen))


def test_gradients_are_those_of_the_values_that_arrived(model: Attending) -> None:
    inputs = torch.rand(1, 3, 4)
    twin = copy.deepcopy(model)
    waits = Waits(model)
    for module in (model, twin):
        module(inputs).square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad))
    assert waits.under_way() == {"unused.weight", "unused.bias"}


USES: dict[str, Callable[[Any], Any]] = {
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "arithmetic": lambda p: p + 0,
    "item": lambda p: torch.tensor([[value.item() for value in row] for row in p]),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "a list": lambda p: torch.stack([p])[0],
    "out of place in a function": lambda p: torch.nn.functional.linear(torch.eye(4), p).t(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0],
    "an operator": lambda p: torch.ops.aten.clone(p),
    "an expression": lambda p: torch.einsum("ij->ij", p),
}


@pytest.mark.parametrize("use", USES)
def test_values_are_waited_for(model: Attending, use: str) -> None:
    waits = Waits(model)
    value = USES[use](model.head.weight)
    assert torch.equal(value, waits.final[waits.names.index("head.weight")])
    assert not isinstance(value, UnderWay)
    assert set(waits.seen) == {"head.weight"}
    assert type(model.head.weight) is nn.Parameter


def test_what_is_written_is_not_overwritten(model: Attending) -> None:
    waits = Waits(model)
    with torch.no_grad():
        model.head.weight.fill_(3.0)
        model.head.bias.data = torch.full((2,), 4.0)
        model.unused.load_state_dict({"weight": torch.zeros(2, 4), "bias": torch.ones(2)})
    assert waits.under_way().isdisjoint({"head.weight", "head.bias", "unused.weight", "unused.bias"})
    assert (model.head.weight == 3).all() and (model.head.bias == 4).all() and (model.unused.bias == 1).all()


LOOKS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: (p.shape, p.size(), p.dim(), p.numel(), p.stride(), p.dtype, p.device),
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "gradient": lambda p: p.grad,
    "gradient set": lambda p: setattr(p, "grad", None),
    "zeros_like": torch.zeros_like,
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "hash": hash,
    "hook": lambda p: p.register_hook(lambda gradient: gradient),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_needs_no_values_does_not_wait(model: Attending, look: str) -> None:
    waits = Waits(model)
    LOOKS[look](model.head.weight)
    assert waits.seen == [] and isinstance(model.head.weight, UnderWay)


def test_whole_models(model: Attending) -> None:
    for use in (
        copy.deepcopy,
        lambda module: torch.save(module, io.BytesIO()),
        lambda module: [value.clone() for value in module.state_dict().values()],
        lambda module: torch.nn.utils.parameters_to_vector(module.parameters()),
        lambda module: module.double(),
    ):
        module = copy.deepcopy(model)
        waits = Waits(module)
        use(module)
        assert not {name for name in waits.under_way() if "running" not in name}


def test_a_copy_is_waited_for_by_nobody(model: Attending) -> None:
    waits = Waits(model)
    made = copy.deepcopy(model)
    waits.start()
    made(torch.rand(1, 3, 4))
    assert waits.seen == []
    assert all(type(parameter) is nn.Parameter for parameter in made.parameters())


def test_what_is_settled_is_as_before(model: Attending) -> None:
    waits = Waits(model)
    waits.settle_all()
    assert waits.under_way() == set()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())


def test_tensors_whose_synchronizer_is_gone(model: Attending) -> None:
    Waits(model)  # nobody keeps it
    assert model.head.weight.isnan().all()
    assert type(model.head.weight) is nn.Parameter


def test_an_error_of_the_wait_comes_again(model: Attending) -> None:
    class Broken(Waits):
        def arrive_all(self, positions: Sequence[int]) -> None:
            raise RuntimeError("rank 2 died")

    waits = Broken(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 2 died"):
            model(torch.rand(1, 3, 4))
    assert "head.weight" in waits.under_way()


class Scaled(nn.Parameter):
    """A parameter of a library, with a class of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.Tensor.add else result


def test_a_class_of_ones_own_is_kept() -> None:
    module = nn.Linear(2, 2)
    module.weight = Scaled(torch.ones(2, 2))
    waits = Waits(module)
    assert isinstance(module.weight, Scaled) and isinstance(module.weight, UnderWay)
    assert (module.weight.add(0) == 2).all()
    assert type(module.weight) is Scaled
    assert waits.seen == ["weight"]


def test_own_gradients() -> None:
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    gradient = module.weight.grad
    Waits(module)
    assert own_gradient(module.weight) is gradient and module.weight.grad is gradient
