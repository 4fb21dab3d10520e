"""Who reads or trains parameters of "dear" by another way than the wrapped model's forward pass."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from largest import largest
from sharded import (
    SIZES,
    SIZES_AND_DTYPES,
    Pair,
    Transformer,
    adamw,
    adamw_or_sgd,
    batch,
    check_within,
    difference,
    each_in_ways,
    made,
    mlp,
    sgd,
    wide,
)
from test_dear_known_faults import body_branch_by_rank, check_beside_a_fault, in_forms_and_at_fault, late
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def body_looking(rank: Rank) -> dict[str, float]:
    """Parameters are complete whenever somebody looks, right after the step."""
    pair = Pair(rank, made(Transformer), adamw_or_sgd)
    inputs = batch(99, 4)[0]
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for model in (pair.module, pair.twin)]

    def outputs(model: nn.Module) -> float:
        with torch.no_grad():
            ours, expected = model(inputs), pair.twin(inputs)
        return float((ours - expected).abs().max() / expected.abs().max())

    def evaluated() -> float:
        pair.ddp.eval()
        pair.twin.eval()
        found = outputs(pair.ddp)
        pair.ddp.train()
        pair.twin.train()
        return found

    def saved() -> float:
        buffer = io.BytesIO()
        torch.save(pair.ddp.state_dict(), buffer)
        buffer.seek(0)
        other = made(Transformer)
        other.load_state_dict({k.removeprefix("module."): v for k, v in torch.load(buffer).items()})
        return difference(other, pair.twin)

    def averaged() -> float:
        for average, model in zip(averages, (pair.module, pair.twin), strict=True):
            average.update_parameters(model)
        return difference(*(average.module for average in averages))

    def inside_averaged() -> float:
        with pair.sync.averaged() as module:
            return difference(module, pair.twin)

    def synchronized() -> float:
        pair.sync.synchronize()
        return difference(pair.module, pair.twin)

    def kept() -> float:
        ours, expected = (optimizer.state_dict()["state"] for optimizer in (pair.optimizer, pair.plain))
        apart = [
            float((ours[index][key] - value).abs().max() / value.abs().max())
            for index, values in expected.items()
            for key, value in values.items()
        ]
        return largest(apart)

    looks: dict[str, Callable[[], float]] = {
        "eval()": evaluated,
        "no_grad": lambda: outputs(pair.ddp),
        "no_grad without the wrapper": lambda: outputs(pair.module),
        "state_dict()": saved,
        "optimizer.state_dict()": kept,
        "an average": averaged,
        "averaged()": inside_averaged,
        "synchronize()": synchronized,
    }
    found = {}
    for name, look in looks.items():
        pair.step()
        found[name] = look()
    pair.step()
    pair.sync.detach()
    found["leaving the loop"] = difference(pair.module, pair.twin)
    return found


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_parameters_are_complete_whenever_looked_at(size: int, dtype: str) -> None:
    for found in run_ranks(in_forms_and_at_fault, size, dtype, body_looking, late):
        check_beside_a_fault(found, dtype)


def body_copying(rank: Rank) -> dict[str, float]:
    """A copy of the model is complete."""
    copies: dict[str, Callable[[nn.Module], nn.Module]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
        "an average made now": lambda module: AveragedModel(module).module,
        "a part": lambda module: nn.Sequential(*(copy.deepcopy(part) for part in module)),
        "a copy of a copy": lambda module: copy.deepcopy(copy.deepcopy(pickle.loads(pickle.dumps(module)))),
    }
    found = {}
    for name, copied in copies.items():
        pair = Pair(rank, made(wide), sgd).run(3)
        copy_of = copied(pair.module)
        found[name] = difference(copy_of, pair.twin)
        pair.run(1).done()
        with torch.no_grad():
            for parameter in copy_of.parameters():
                parameter.fill_(2.0)
        # It is a module of its own, whose copies are copies of it.
        assert all(bool((p == 2).all()) for p in copy.deepcopy(copy_of).parameters())
    return found


class Parted(nn.Module):
    """Training calls methods of a part, and one of two branches; the part's own forward pass is another."""

    def __init__(self) -> None:
        super().__init__()
        self.part = mlp()
        self.part.register_parameter("shift", nn.Parameter(torch.zeros(16)))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.part.shift
        for layer in self.part:  # type: ignore[attr-defined]
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


def body_part(rank: Rank) -> float:
    """A part that training does not call."""
    pair = Pair(rank, made(Parted), adamw)
    worst = 0.0
    inputs = batch(99, 4)[0]
    for _ in range(4):
        pair.step()
        seen = []
        for model in (pair.module, pair.twin):
            part = model.part
            shifts: list[Any] = []
            assert isinstance(part, nn.Module)
            handle = part.register_forward_pre_hook(lambda m, _, shifts=shifts: shifts.append(m.shift.detach().clone()))
            with torch.no_grad():
                seen.append((part(inputs), shifts))
            handle.remove()
        worst = largest(worst, float((seen[0][0] - seen[1][0]).abs().max()))
        worst = largest(worst, float((seen[0][1][0] - seen[1][1][0]).abs().max()))
    return largest(worst, pair.done())


def compiled_whole() -> nn.Module:
    return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]


def compiled_part() -> nn.Module:
    layers = mlp()
    return nn.Sequential(torch.compile(layers[:2], backend="eager"), *layers[2:])  # type: ignore[index]


def body_compiled(rank: Rank) -> dict[str, float]:
    """A compiled model called without its wrapper."""
    found = {}
    for kind in (compiled_whole, compiled_part):
        pair = Pair(rank, made(kind), adamw)
        worst = 0.0
        for _ in range(4):
            pair.step()
            with torch.no_grad():
                inputs = batch(99, 4)[0]
                worst = largest(worst, float((pair.ddp.module(inputs) - pair.twin(inputs)).abs().max()))
        found[kind.__name__] = largest(worst, pair.done())
    return found


def body_pass_beside(rank: Rank) -> float:
    """Behind each step, while plans change, a backward pass without the wrapper: its gradients are dropped."""
    pair = Pair(rank, made(mlp), sgd, fallback=True, bucket_mb="auto")
    modes = ""
    for _ in range(60):
        pair.step()
        for model in (pair.module, pair.twin):
            model[:3](batch(7, 1)[0]).square().mean().backward()  # type: ignore[index]
        modes += str(pair.sync.stats()["mode"])[0]
    assert rank.size == 1 or "ad" in modes  # one rank alone has no all-reduce to try
    return pair.done()


def body_branches_while_plans_change(rank: Rank) -> float:
    """In the replicated form, the step that is deferred when the plan turns to all-reduce has gathered gradients."""
    return body_branch_by_rank(rank, sgd, steps=80, fallback=True)


BODIES = [body_copying, body_part, body_compiled, body_pass_beside, body_branches_while_plans_change]


@pytest.mark.parametrize("size", SIZES)
def test_ways_beside_the_wrapper(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, BODIES, deadline=120):
        check_within(worst)
