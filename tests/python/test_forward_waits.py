"""Who waits for which parameters in front of a forward pass; without processes, torch's DDP or native code."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchext", reason="torchext is not installed")

from torchext._forward_waits import FlushedMethod, ForwardWaits


class Wrapper(nn.Module):
    """What ForwardWaits needs of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Waits:
    """A wrapped model, and what has been waited for, by name."""

    def __init__(self, module: nn.Module) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        self.seen: list[Any] = []
        self.ddp: Any = Wrapper(module)
        self.waits = ForwardWaits(self.ddp, list(module.parameters()), self.some, self.all)

    def some(self, positions: list[int]) -> None:
        self.seen.append({self.names[position] for position in positions})

    def all(self) -> None:
        self.seen.append("all")

    def forward(self) -> list[Any]:
        self.seen.clear()
        self.ddp(torch.zeros(1, 3, 4))
        return list(self.seen)


@pytest.fixture
def waits() -> Waits:
    return Waits(Attending())


def test_the_first_forward_waits_for_everything(waits: Waits) -> None:
    assert set(waits.forward()) == {"all"}


def test_a_module_waits_for_children_that_it_reads_without_calling(waits: Waits) -> None:
    waits.forward()
    attention, head, *more = (
        seen for seen in waits.forward() if "attention.in_proj_weight" in seen or "head.bias" in seen
    )
    assert attention >= {"attention.in_proj_weight", "attention.out_proj.weight", "attention.out_proj.bias"}
    assert head == {"head.weight", "head.bias"}
    assert not more


def test_what_nobody_calls_is_waited_for_by_the_root(waits: Waits) -> None:
    waits.forward()
    assert waits.forward()[0] == {"unused.weight", "unused.bias"}


class Fused(nn.Module):
    """In training it reads what its child has, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.training and torch.is_grad_enabled()
        return self.head(nn.functional.linear(x, self.child.weight, self.child.bias) if fused else self.child(x))


def evaluate(waits: Waits) -> None:
    waits.ddp.eval()
    waits.forward()
    waits.ddp.train()


def evaluate_without_gradients(waits: Waits) -> None:
    with torch.no_grad():
        waits.forward()


def call_the_child(waits: Waits) -> None:
    waits.ddp.module.child(torch.zeros(1, 4))


def fail_in_evaluation(waits: Waits) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError):
        waits.ddp(torch.zeros(1, 3))


@pytest.mark.parametrize("first", [evaluate, evaluate_without_gradients, call_the_child, fail_in_evaluation])
def test_only_what_training_calls_waits_by_itself(first: Callable[[Waits], None]) -> None:
    waits = Waits(Fused())
    first(waits)
    assert set(waits.seen) <= {"all"}
    assert set(waits.forward()) == {"all"}
    assert waits.forward() == [{"child.weight", "child.bias"}, {"head.weight", "head.bias"}]


def test_evaluation_waits_for_everything(waits: Waits) -> None:
    waits.forward()
    waits.ddp.eval()
    assert "all" in waits.forward()
    waits.ddp.train()
    with torch.no_grad():
        assert "all" in waits.forward()
    assert "all" not in waits.forward()


def test_state_dict_waits(waits: Waits) -> None:
    waits.ddp.state_dict()
    assert "all" in waits.seen


def test_copies_and_pickles_wait_for_nothing(waits: Waits) -> None:
    waits.forward()
    flushed = FlushedMethod(waits.ddp.module, "train", waits.all)
    clone = copy.deepcopy(waits.ddp.module)
    buffer = io.BytesIO()
    torch.save(waits.ddp.module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    waits.seen.clear()
    for module in (clone, loaded):
        module.eval()(torch.zeros(1, 3, 4))
        module.train()
        assert module.training and waits.ddp.module.training
        module.state_dict()
    assert waits.seen == []
    waits.ddp.module.train()
    assert waits.seen == ["all"]
    flushed.remove()


def test_a_flushed_method_waits_and_is_given_back(waits: Waits) -> None:
    flushed = FlushedMethod(waits.ddp.module, "named_parameters", waits.all)
    assert len(list(waits.ddp.module.parameters())) == len(waits.names)
    assert waits.seen == ["all"]
    flushed.remove()
    list(waits.ddp.module.parameters())
    assert waits.seen == ["all"]


def test_remove_takes_all_hooks_off(waits: Waits) -> None:
    waits.forward()
    waits.waits.remove()
    assert waits.forward() == []
