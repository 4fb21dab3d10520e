"""Whoever uses a parameter after a step, whatever way, has the one that plain DDP would have."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import at_once
from beside_ddp import ATTACHED, DEAR, Script, check_apart, check_rows_apart, wide
from harness import Rank
from rows import row_values
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import torchext


def loss(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def train(script: Script, step: Callable[[nn.Sequential], torch.Tensor], steps: int = 6) -> torch.Tensor:
    """A step is a function of the model to the loss."""
    model = wide()
    script.wrap(model)
    optimizer = torch.optim.SGD(script.ddp.parameters(), lr=0.05)
    script.attach(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        step(model).backward()
        optimizer.step()
    return script.result()


def part_before(script: Script) -> torch.Tensor:
    """``h = net.embed(x); ddp(h)``: here of the last part, so that its parameters come late."""

    def step(model: nn.Sequential) -> torch.Tensor:
        with torch.no_grad():
            offset = model[4](torch.ones(1, 400))
        return loss(script.ddp(script.inputs()) + offset)

    return train(script, step)


def penalty_before(script: Script) -> torch.Tensor:
    """Weights outside of their module, in front of the forward pass."""

    def step(model: nn.Sequential) -> torch.Tensor:
        penalty = model[4].weight.square().sum() + model[2].weight.square().sum()
        return loss(script.ddp(script.inputs())) + 0.01 * penalty

    return train(script, step)


def functional_weight(script: Script) -> torch.Tensor:
    def step(model: nn.Sequential) -> torch.Tensor:
        with torch.no_grad():
            scores = functional.linear(torch.ones(1, 400), model[4].weight, bias=model[4].bias)
        return loss(script.ddp(script.inputs()) + scores)

    return train(script, step)


def average_of_a_list(script: Script) -> torch.Tensor:
    """A list of parameters that the script has held from the beginning."""
    model = wide()
    held = list(model.parameters())
    average = [parameter.detach().clone() for parameter in held]
    script.wrap(model)
    optimizer = torch.optim.SGD(held, lr=0.05)
    script.attach(optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        loss(script.ddp(script.inputs())).backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, held, 0.5)  # type: ignore[arg-type]
    script.result()
    return torch.cat([value.flatten() for value in average])


def clipped_weights(script: Script) -> torch.Tensor:
    """Written through ``optimizer.param_groups``."""
    model = wide()
    script.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    script.attach(optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        loss(script.ddp(script.inputs())).backward()
        optimizer.step()
        if script.sync is not None:
            script.sync.synchronize()  # decentralized: of the average
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.02, 0.02)
    return script.result()


def copies(script: Script) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def step(model: nn.Sequential) -> torch.Tensor:
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(made[4].weight) is nn.Parameter
            seen.append(made[4].weight.detach().clone())
        return loss(script.ddp(script.inputs()))

    train(script, step)
    return torch.cat([value.flatten() for value in seen])


def collective(script: Script) -> torch.Tensor:
    """A parameter is handed to a collective, which takes it in C++."""

    def step(model: nn.Sequential) -> torch.Tensor:
        summed = [torch.zeros_like(model[4].weight) for _ in range(2)]
        dist.all_gather(summed, model[4].weight.detach())
        dist.broadcast(model[4].bias, 0)
        return loss(script.ddp(script.inputs())) + 0 * summed[0].sum()

    return train(script, step)


class Unasked(torch.autograd.Function):
    """As an extension in C++, which reads the memory of the weight that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class Extended(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Unasked.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def extension(script: Script) -> torch.Tensor:
    script.wrap(nn.Sequential(Extended(16, 400), nn.Tanh(), Extended(400, 400), nn.Tanh(), Extended(400, 4)))
    optimizer = torch.optim.SGD(script.ddp.parameters(), lr=0.05)
    script.attach(optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        loss(script.ddp(script.inputs())).backward()
        optimizer.step()
    return script.result()


def kept_memory(script: Script) -> torch.Tensor:
    """What has the memory of parameters, kept from before the first step, and read as it is after each."""
    model = wide()
    vector = nn.utils.parameters_to_vector(list(model[0].parameters())).detach()
    nn.utils.vector_to_parameters(vector, model[0].parameters())  # views of it
    script.wrap(model)
    kept = [vector, model[2].weight.data, *model[4].state_dict().values()]
    array = model[2].bias.detach().numpy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    script.attach(optimizer)
    seen = []
    for _ in range(6):
        optimizer.zero_grad()
        loss(script.ddp(script.inputs())).backward()
        optimizer.step()
        seen += [tensor.flatten().clone() for tensor in kept] + [torch.from_numpy(array.copy())]
    script.result()
    return torch.cat(seen)


def transformed(script: Script) -> torch.Tensor:
    """What functions of parameters are made of, right after a step: derivatives, traces, and passes without values."""
    inputs = torch.ones(2, 16)
    numbers = itertools.count(-1)  # from the second pass on: no step is before the first
    seen: list[torch.Tensor] = []
    evaluations: list[Callable[[nn.Module], Any]] = [
        lambda model: torch.func.jvp(model, (inputs,), (inputs,))[1],
        lambda model: torch.func.jacrev(model)(inputs[0]),
        lambda model: torch.jit.trace(model, inputs)(inputs),
        lambda model: make_fx(model)(inputs)(inputs),
        without_values,
    ]

    def step(model: nn.Sequential) -> torch.Tensor:
        if 0 <= (number := next(numbers)) < len(evaluations):
            seen.append(evaluations[number](model).detach().flatten())
        return loss(script.ddp(script.inputs()))

    weights = train(script, step)
    assert len(seen) == len(evaluations)
    return torch.cat([*seen, weights])


def without_values(model: nn.Module) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = model(torch.ones(2, 16)).shape
    return torch.tensor(shape, dtype=torch.float32)


SCRIPTS = [
    *(part_before, penalty_before, functional_weight, average_of_a_list, clipped_weights),
    *(copies, collective, extension, kept_memory, transformed),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_parameters_are_those_of_plain_ddp(script: Callable[[Script], torch.Tensor]) -> None:
    check_apart(ATTACHED, script)


def by_threads(script: Script, form: str) -> torch.Tensor:
    """Several threads read all parameters at once after each step."""

    def norms(model: nn.Module) -> torch.Tensor:
        return torch.stack([parameter.detach().norm() for parameter in model.parameters()])

    seen: list[torch.Tensor] = []
    with concurrent.futures.ThreadPoolExecutor(3) as threads:

        def step(model: nn.Sequential) -> torch.Tensor:
            if script.attached and form in ("dear", "dear-replicated"):
                script.sync.wait()  # whose steps are made in the thread that reads
            seen.extend(threads.map(norms, [model] * 3))
            return loss(script.ddp(script.inputs()))

        weights = train(script, step)
    return torch.cat([*seen, weights])


def test_threads_that_read_at_once() -> None:
    check_rows_apart({form: (form, by_threads, form) for form in ATTACHED})


def body_held(rank: Rank, form: str) -> list[int]:
    """The parameters for which every step would wait, without need."""
    rank.init("gloo")
    script = Script(rank, form)
    script.wrap(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.TransformerEncoderLayer(8, 2, 8)))
    optimizer = torch.optim.AdamW(script.ddp.parameters())
    script.attach(optimizer)
    held, losses = [], []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss(script.ddp(script.inputs())))
        losses[-1].backward()
        optimizer.step()
        held += script.sync._memory_of_scripts()
    script.result()
    return held


def test_nobody_but_the_script_holds_memory_of_parameters() -> None:
    for form, held in row_values(body_held, 2, {form: (form,) for form in ATTACHED}).items():
        assert held == [[], []], form


@dataclasses.dataclass
class Boxed:
    """An output of which torch finds no tensor."""

    value: torch.Tensor


class Boxing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = wide(), kind

    def forward(self, inputs: torch.Tensor) -> Any:
        output = self.layers(inputs)
        if self.kind == "distribution":
            return torch.distributions.Normal(output, 1.0)
        if self.kind == "closure":
            return lambda: output
        return Boxed(output)


def opaque(script: Script, kind: str, then: str) -> torch.Tensor:
    script.wrap(Boxing(kind))
    optimizer = torch.optim.SGD(script.ddp.parameters(), lr=0.05, momentum=0.9)
    script.attach(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        made = script.ddp(script.inputs())
        if kind == "distribution":
            made.log_prob(torch.ones(())).mean().neg().backward()
        else:
            loss(made() if kind == "closure" else made.value).backward()
        if then == "clip":
            nn.utils.clip_grad_norm_(script.ddp.parameters(), 0.01)
        elif then == "zero":
            script.ddp.zero_grad()
        optimizer.step()
    return script.result()


def test_outputs_without_tensors() -> None:
    rows = itertools.product(DEAR, ["distribution", "closure", "object"], ["", "clip", "zero"])
    check_rows_apart({f"{form}, {kind}, {then}": (form, opaque, kind, then) for form, kind, then in rows})


def body_nothing_kept(rank: Rank, backend: str) -> list[int]:
    """How many parameters the step waits for, because somebody seems to hold their memory."""
    rank.init(backend, pg_options=at_once(backend))
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    sync: Any = torchext.attach(ddp, optimizer)
    held = []
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        held.append(len(sync._memory_of_scripts()))
    sync.detach()
    return held


def test_a_plain_loop_keeps_no_memory_of_parameters() -> None:
    """Else each step would wait for all that is under way."""
    rows = {backend: (backend,) for backend in ("dear", "dssync", "hop", "prague")}
    for backend, held in row_values(body_nothing_kept, 2, rows).items():
        assert held == [[0] * 4] * 2, backend
