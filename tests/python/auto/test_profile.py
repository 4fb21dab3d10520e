"""profile() finds ready times and first uses by hooks, leaves no trace, and refuses what it cannot measure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from torchext import auto


class Slow(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Net(nn.Module):
    """Three layers with waits between; one that is never used, a frozen one, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        x = Slow.apply(self.first(words), 0.01)
        x = Slow.apply(self.norm(x), 0.02)
        return {"logits": self.frozen(nn.functional.dropout(self.last(x), 0.5, self.training))}


def step(model: Any) -> None:
    model(torch.randint(10, (6,)))["logits"].square().mean().backward()


@pytest.fixture
def group() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ready_times_and_first_uses() -> None:
    found = auto.profile(Net(), step, steps=3)
    named = {parameter.name: parameter for parameter in found.parameters}
    assert set(named) == {"first.weight", "norm.weight", "norm.bias", "last.weight", "last.bias"}
    assert found.without_gradient == ("unused.weight", "unused.bias")
    assert len(found.forward_seconds) == 5  # before the first layer, the three, the frozen one
    assert [named[name].first_use for name in ("first.weight", "norm.bias", "last.bias")] == [1, 2, 3]
    assert found.parameters[-1].name == "first.weight"
    assert named["norm.weight"].ready_seconds - named["last.weight"].ready_seconds > 0.035
    assert named["first.weight"].ready_seconds - named["norm.weight"].ready_seconds > 0.015
    assert 0.005 < found.forward_seconds[1] < found.forward_seconds[2]
    assert found.backward_seconds >= 0.055
    assert [len(samples) for samples in found.step_seconds] == [3]
    assert found.compute_seconds == pytest.approx(sorted(found.step_seconds[0])[1], rel=0.5)


def test_kinds_and_rows() -> None:
    named = {parameter.name: parameter for parameter in auto.profile(Net(), step, steps=1).parameters}
    assert [(named[n].kind, named[n].rows) for n in ("first.weight", "norm.weight", "last.weight", "last.bias")] == [
        ("embedding", 6),
        ("dense", 0),
        ("linear", 6),
        ("dense", 0),
    ]
    assert (named["last.weight"].shape, named["last.weight"].nbytes) == ((4, 8), 128)


def test_it_leaves_no_trace() -> None:
    model = Net()
    model.norm.eval()
    model.last.weight.grad = torch.ones(4, 8)
    gradient = model.last.weight.grad
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()

    def training_step(net: Any) -> None:
        net.train()
        step(net)

    auto.profile(model, training_step, steps=2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert model.last.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 8))
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "last.weight")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_buffer_that_is_replaced_comes_back() -> None:
    class Counter(nn.Linear):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return super().forward(x)

    model = Counter()
    count = model.count
    auto.profile(model, lambda net: net(torch.ones(1, 2)).sum().backward())
    assert model.count is count
    assert count == 0


# ---- Bad input: one test a row of the design's table ----


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got int; pass the module"):
        auto.profile(3, step)  # type: ignore[arg-type]


def test_step_is_not_callable() -> None:
    with pytest.raises(TypeError, match="step must be callable with the model, got NoneType"):
        auto.profile(Net(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 1001, 2.5, True])
def test_a_number_of_steps_out_of_range(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps must be a whole number from 1 to 1000, got"):
        auto.profile(Net(), step, steps=steps)


@pytest.mark.usefixtures("group")
def test_step_makes_a_collective() -> None:
    def reducing(model: Any) -> None:
        step(model)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match=r"step makes a collective \(allreduce\)"):
        auto.profile(Net(), reducing)


def test_step_leaves_no_gradients() -> None:
    with pytest.raises(ValueError, match="step leaves no gradients"):
        auto.profile(Net(), lambda model: model(torch.zeros(2, dtype=torch.long)))


def test_step_writes_parameters() -> None:
    model = Net()
    before = model.last.weight.detach().clone()

    def optimizing(net: Any) -> None:
        step(net)
        torch.optim.SGD(net.parameters(), lr=1.0).step()

    with pytest.raises(ValueError, match=r"step writes the parameter 'first.weight'; leave the optimizer out"):
        auto.profile(model, optimizing)
    assert torch.equal(model.last.weight, before)


def test_what_step_raises_comes_out_and_leaves_no_trace() -> None:
    model = Net()
    with pytest.raises(KeyError):
        auto.profile(model, lambda net: net(torch.zeros(2, dtype=torch.long))["loss"])
    assert not model.first._forward_pre_hooks


def test_synchronized_batch_norm() -> None:
    with pytest.raises(ValueError, match="'norm' is a SyncBatchNorm"):
        auto.profile(nn.SyncBatchNorm.convert_sync_batchnorm(Net()), step)


@pytest.mark.usefixtures("group")
def test_a_wrapped_model() -> None:
    wrapped = DistributedDataParallel(nn.Linear(1, 1))
    for call in (auto.profile, auto.plan):
        with pytest.raises(TypeError, match=r"wrapped .*pass the module"):
            call(wrapped, step)
    with pytest.raises(TypeError, match="'0' is wrapped"):
        auto.profile(nn.Sequential(wrapped), step)


@pytest.mark.usefixtures("group")
def test_a_plan_of_one_rank() -> None:
    assert auto.plan(Net(), step).explain() == "1 rank: nothing to synchronise"


@pytest.mark.usefixtures("group")
def test_links_of_one_rank() -> None:
    with pytest.raises(ValueError, match="the group has one rank, and no links"):
        auto.calibrate()


def test_before_the_group_is_made() -> None:
    for call in (auto.calibrate, lambda: auto.plan(Net(), step)):
        with pytest.raises(RuntimeError, match=r"before torch.distributed.init_process_group"):
            call()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allow": ["pragu"]}, "allow must be of 'exact', .*got 'pragu'; did you mean 'prague'"),
        ({"choose": "dear"}, "choose must be 'auto' or one of prague, dssync, hop, got 'dear'"),
        ({"choose": "prague"}, "choose is 'prague', and allow is"),
        ({"form": "split"}, "form must be 'sharded' or 'replicated', got 'split'"),
        ({"memory": -1}, "memory must be finite and 0 or more, got -1"),
        ({"memory": 500}, r"memory is 500 bytes, and parameters take \d+, gradients \d+ and the optimizer's state \d+"),
    ],
)
def test_bad_arguments_of_plan(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auto.plan(Net(), step, **arguments)


@pytest.mark.usefixtures("group")
def test_a_profile_of_another_model() -> None:
    other = auto.profile(nn.Linear(2, 1), lambda net: net(torch.ones(1, 2)).sum().backward(), steps=1)
    with pytest.raises(ValueError, match=r"profile is of another model: .* has shape .* there and none here"):
        auto.plan(Net(), step, profile=other)


@pytest.mark.usefixtures("group")
def test_what_is_no_group() -> None:
    with pytest.raises(TypeError, match="group must be a process group"):
        auto.calibrate(3)  # type: ignore[arg-type]
