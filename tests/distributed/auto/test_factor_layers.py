"""Training with layers whose rows travel is training with plain DDP, and all ranks end with the same bits."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, launch, run_ranks
from largest import largest
from made_plans import Beside, plan_for
from made_plans import Net as Planned
from rows_beside import EXACT, Pair, adamw, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchext
from torchext import auto
from torchext.errors import FactorGradientError

NAMES = ("first", "second", "maybe")


class Net(nn.Module):
    """Some layers send rows; one is used in some steps only, on some ranks only."""

    names = NAMES

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 20, bias=False)
        self.maybe = nn.Linear(20, 20)
        self.head = nn.Linear(20, 3)
        self.second.requires_grad_(True)
        self.first.bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, *, maybe: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.head(torch.tanh(self.maybe(hidden)) + hidden if maybe else hidden)

    @staticmethod
    def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.rand(rows, 16, generator=generator) * 2 - 1
        return inputs, inputs[:, :3].sin()


def body_exact(rank: Rank) -> dict[str, float]:
    rank.init("dear")
    found = {}
    for name, optimizer in (("sgd", sgd), ("adamw", adamw)):
        pair = Pair(rank, Net, optimizer)
        for step in range(20):
            pair.backward(1 + (step + 3 * rank.rank) % 8)  # rows vary
            pair.step(clip=step % 2 == 0)
        found[name] = pair.apart()
        stats = pair.layers.stats()
        assert (stats["steps"], stats["early_messages"], stats["reductions"]) == (20, 20, 0)

    pair = Pair(rank, Net, sgd)
    for step in range(20):
        with pair.models[0].no_sync(), pair.models[1].no_sync():
            pair.backward(3, part=1)
            pair.backward(2, part=2)
        if step % 5 == 0:  # begun anew
            pair.optimizers[0].zero_grad()
            pair.optimizers[1].zero_grad()
        # More than the places, on one rank, now and then.
        pair.backward(14 if step % 4 == 1 and rank.rank else 4)
        pair.step()
    found["no_sync"] = pair.apart()
    assert 0 < pair.layers.stats()["reductions"] < 20

    pair = Pair(rank, Net, adamw, find_unused_parameters=True)
    for step in range(20):
        last = step == 19 and rank.rank == 1  # an empty batch
        pair.backward(0 if last else 8, maybe=step % 3 == 0 or (step % 3 == 1 and rank.rank == 0))
        for name, parameter in pair.models[0].module.named_parameters():
            assert step % 3 < 2 or "maybe" not in name or parameter.grad is None
        pair.step()
    found["unused"] = pair.apart()
    dist.destroy_process_group()
    return found


def test_rows_train_as_plain_ddp_does() -> None:
    for found in run_ranks(body_exact, 2, deadline=120):
        assert largest(found.values()) < EXACT, found


class Checkpointed(Net):
    def forward(self, inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        output: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
        return output


def body_numbers(rank: Rank) -> None:
    """Narrow types, checkpoints, compiled models, copies, and calls that are no training."""
    rank.init("dear")
    pair = Pair(rank, Net, sgd)
    ours, plain = pair.models
    names = list(Net().state_dict())
    assert list(ours.module.state_dict()) == names
    inputs = torch.rand(4, 16)
    expected = plain(inputs)
    assert torch.equal(ours(inputs), expected)
    alone = copy.deepcopy(ours.module)
    alone(inputs).sum().backward()
    assert alone.first.weight.grad is not None
    assert not hasattr(alone, "_ddp_params_and_buffers_to_ignore")  # DDP averages all of a copy

    # The input's gradient by itself, while the graph is kept, is no step.
    read = inputs.clone().requires_grad_()
    output = ours(read)
    (gradient,) = torch.autograd.grad(output.sum(), read, retain_graph=True)
    also = inputs.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(plain(also).sum(), also)
    assert torch.allclose(gradient, wanted)
    output.sum().backward()
    assert pair.layers.stats()["steps"] == 1
    pair.step()
    with pytest.raises(NotImplementedError, match="no gradients of gradients"):
        ours(inputs).sum().backward(create_graph=True)
    pair.layers.remove()
    assert type(ours.module.first).forward is nn.Linear.forward
    assert "forward" not in vars(ours.module.first)

    for case in ("autocast", "bfloat16", "checkpoint", "compiled", "float64"):
        models = []
        for by_rows in (True, False):
            dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(case, torch.float32)
            model: nn.Module = (Checkpointed() if case == "checkpoint" else Net()).to(dtype)
            layers = auto.FactorLayers(model, NAMES, 16) if by_rows else None
            if layers is not None:
                layers.install()
            ddp = DistributedDataParallel(model)
            if layers is not None:
                layers.follow(ddp)
            run: Any = torch.compile(ddp, backend="eager") if case == "compiled" and by_rows else ddp
            batch = torch.rand(5, 16, generator=torch.Generator().manual_seed(rank.rank)).to(dtype)
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
                    output = run(batch)
                output.float().pow(2).sum().backward()
            models.append(model)
        limit = 2e-2 if case in ("autocast", "bfloat16") else 1e-5
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            if b.grad is None:
                assert a.grad is None
                continue
            assert a.grad is not None
            assert a.grad.dtype == b.dtype
            assert (a.grad - b.grad).abs().max() <= limit * b.grad.abs().max(), case
    dist.destroy_process_group()


def test_types_checkpoints_and_copies() -> None:
    run_ranks(body_numbers, 2, deadline=120)


class Elsewhere(Net):
    def forward(self, inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        return super().forward(inputs) + self.first.weight.sum()


def body_errors(rank: Rank) -> None:
    rank.init("dear")
    model = Elsewhere()
    layers = auto.FactorLayers(model, ["first"], 8)
    layers.install()
    with pytest.raises(RuntimeError, match="install\\(\\) was called already"):
        layers.install()
    with pytest.raises(RuntimeError, match="call follow\\(ddp\\) first"):
        model(torch.ones(2, 16))
    ddp = DistributedDataParallel(model)
    layers.follow(ddp)
    with pytest.raises(FactorGradientError, match="a parameter of 'first' got a gradient from outside"):
        ddp(torch.ones(2, 16)).sum().backward()

    # All ranks raise in one pass, before DDP has begun to average, and train on.
    pair = Pair(rank, Net, sgd)
    broken = pair.models[0].module.head.register_full_backward_pre_hook(fail)
    with pytest.raises(LookupError):
        pair.models[0](torch.ones(2, 16)).sum().backward()
    broken.remove()
    for _ in range(3):
        pair.backward(4)
        pair.step()
    assert pair.apart() < EXACT

    refused: list[tuple[Any, Any, Any, Any, str]] = [
        (DistributedDataParallel(Net()), ["first"], 8, TypeError, "the module before DDP wraps it"),
        (Net(), [], 8, ValueError, "names must be those of some layers"),
        (Net(), ["fist"], 8, ValueError, "no module 'fist'"),
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), ["1"], 8, TypeError, "'1' is Tanh"),
        (Net(), ["first"], 0, ValueError, "rows must be a whole number, 1 or more, got 0"),
        (Net(), ["first"], {"second": 8}, ValueError, "rows has none for 'first'"),
        (nn.Sequential(nn.Linear(2, 2)), ["0"], 8, ValueError, "leave no trained parameter"),
        (frozen(), ["first"], 8, ValueError, "weight of 'first' is frozen"),
        (tied(), ["0"], 8, ValueError, "weight of '0' is shared"),
        (hooked(), ["first"], 8, ValueError, "weight of 'first' has hooks"),
        (normed(), ["first"], 8, TypeError, "'first' is ParametrizedLinear"),
    ]
    for module, names, rows, kind, text in refused:
        with pytest.raises(kind, match=text):
            auto.FactorLayers(module, names, rows)
    plain = dist.new_group(backend="gloo")
    with pytest.raises(TypeError, match="the group's backend is 'gloo'"):
        auto.FactorLayers(Net(), ["first"], 8, plain)
    with pytest.raises(dist.DistBackendError, match="rows\\[0\\] is 8 on rank 0 and 9 on rank 1"):
        auto.FactorLayers(Net(), ["first"], 8 + rank.rank).install()
    dist.destroy_process_group()


def fail(*_: Any) -> None:
    raise LookupError("no gradient")


def frozen() -> nn.Module:
    model = Net()
    model.first.weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = Net()
    model.first.weight.register_hook(lambda gradient: gradient)
    return model


def normed() -> nn.Module:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.first)
    return model


def test_what_is_refused() -> None:
    run_ranks(body_errors, 2)


def body_lost(rank: Rank) -> None:
    rank.init("dear", timeout=20)
    pair = Pair(rank, Net, sgd)
    pair.backward(4)
    pair.step()
    rank.report("trained")
    rank.pause()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        pair.backward(4)


def test_a_lost_rank_is_named() -> None:
    with launch(body_lost, 2) as ranks:
        ranks.expect("trained")
        ranks.kill(1)
        ranks.proceed([0])
        assert ranks.outcomes([0])[0].ok


def body_plan(rank: Rank) -> tuple[float, str]:
    rank.init("gloo")
    model = Planned()
    plan = plan_for(model, "ddp", "program", ranks=2)
    chosen = plan.chosen
    assert chosen is not None
    names = [parameter.name for parameter in plan.profile.parameters]
    kept = [at for at, name in enumerate(names) if not name.startswith(("first", "third"))]
    chosen = dataclasses.replace(chosen, factor_layers=("first", "third"), buckets=(tuple(kept),))
    plan = dataclasses.replace(plan, candidates=(plan.candidates[0], chosen))
    beside = Beside(rank, model, plan, sgd)
    assert isinstance(torchext.backend_of(beside.ddp.process_group), torchext.ProcessGroupDear)
    beside.run(20)
    apart = beside.apart()
    other = Planned()
    other.first.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="sends rows of 'first', and the weight of 'first' has hooks"):
        plan.apply(other, sgd(other.parameters()))
    beside.sync.detach()
    dist.destroy_process_group()
    return apart, plan.explain()


def test_a_plan_with_rows_is_applied() -> None:
    for apart, text in run_ranks(body_plan, 2):
        assert apart < 1e-5
        assert "DDP, 2 layers as rows, 1 bucket of" in text
