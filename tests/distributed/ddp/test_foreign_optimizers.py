"""Optimizers that are not torch's: what their steps are given, when they call closures, and what they return.

Each script is run on plain DDP and attached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attached import Trainer, everywhere, flat
from beside_ddp import ATTACHED, DEAR, Script, check_apart, wide
from harness import Rank, elapsed_error, run_ranks
from largest import largest
from rows import row_values
from torch import nn

STEPS = 4
WHOLE = [form for form in DEAR if form != "dear-sharded"]


class Scaled(torch.optim.Optimizer):
    """Divides by a number that its step is given, and counts its steps in an attribute."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.count = 0

    @torch.no_grad()
    def step(self, scale: float = 1.0, *, more: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        self.count += 1
        largest = torch.zeros(())
        for group in self.param_groups:
            group["lr"] *= 0.9
            for parameter in group["params"]:
                if parameter.grad is not None:
                    largest = largest.maximum(parameter.grad.abs().max() if parameter.grad.numel() else largest)
                    parameter.add_(parameter.grad, alpha=-group["lr"] / scale / more)
        return largest


class Sharpness(torch.optim.Optimizer):
    """Moves parameters along the gradient, calls the closure there, and steps from where they were."""

    def __init__(self, parameters: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        held = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for _, parameter in held]
        for group, parameter in held:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=group["rho"])
        with torch.enable_grad():
            loss = closure()
        for (group, parameter), old in zip(held, before, strict=True):
            parameter.copy_(old)
            parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


def arguments(script: Script, seen: str) -> torch.Tensor:
    script.wrap(wide())
    optimizer = Scaled(script.ddp.parameters())
    script.attach(optimizer)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (8 * script.ddp(script.inputs())).square().mean().backward()
        returned = optimizer.step(32.0, more=2.0 + step)
        if seen == "results":
            found += [returned, torch.tensor(optimizer.count), torch.tensor(optimizer.param_groups[0]["lr"])]
    return torch.cat([script.result(), torch.tensor(found)])


def test_arguments_of_a_step() -> None:
    check_apart(ATTACHED, arguments, "parameters")


def test_what_a_step_returns_and_leaves_in_the_optimizer() -> None:
    check_apart(WHOLE, arguments, "results")


def closure_in_the_middle(script: Script, accumulates: bool) -> torch.Tensor:
    script.wrap(wide())
    optimizer = Sharpness(script.ddp.parameters())
    script.attach(optimizer)
    losses = []
    for _ in range(STEPS):
        inputs = script.inputs()

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            if not accumulates:
                optimizer.zero_grad()
            loss = script.ddp(inputs).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.zero_grad()
        if accumulates:
            with script.ddp.no_sync():
                script.ddp(inputs + 1).square().mean().backward()
        closure()
        losses.append(optimizer.step(closure))
    assert len(losses) == STEPS and all(torch.is_tensor(loss) for loss in losses)
    return script.result()


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_closure_that_is_called_when_parameters_have_moved(accumulates: bool) -> None:
    check_apart(WHOLE, closure_in_the_middle, accumulates)


class Claiming(Sharpness):
    elementwise = True


def body_refused(rank: Rank) -> str:
    rank.init("gloo")
    script = Script(rank, "dear-sharded")
    script.wrap(wide())
    optimizer = Claiming(script.ddp.parameters())
    script.attach(optimizer)

    def closure() -> torch.Tensor:
        loss = script.ddp(script.inputs()).square().mean()
        loss.backward()
        return loss.detach()

    closure()
    return elapsed_error(lambda: optimizer.step(closure))[1]


def test_slices_that_have_moved_before_the_closure_are_refused() -> None:
    for found in run_ranks(body_refused, 2):
        assert "Claiming.step() calls its closure when it has moved" in found and "form='replicated'" in found, found


def closure_of_torch(script: Script) -> torch.Tensor:
    """Of an optimizer of torch's own, whose parameters are stepped in parts as they arrive."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.Tanh())]
    script.wrap(nn.Sequential(nn.Linear(16, 128), *layers))
    optimizer = torch.optim.SGD(script.ddp.parameters(), lr=0.05, momentum=0.9)
    script.attach(optimizer)
    for _ in range(STEPS):
        inputs = script.inputs()

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = script.ddp(inputs).square().mean()
            loss.backward()
            return loss.detach()

        assert torch.is_tensor(optimizer.step(closure))
    return script.result()


def test_a_closure_of_a_step_in_parts() -> None:
    check_apart(ATTACHED, closure_of_torch)


def closure_after_no_sync(script: Script) -> torch.Tensor:
    """The closure's pass, which averages, adds to gradients of no_sync()."""
    script.wrap(wide())
    optimizer = Sharpness(script.ddp.parameters(), rho=0.0)
    script.attach(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with script.ddp.no_sync():
            script.ddp(script.inputs()).square().mean().backward()
        inputs = script.inputs()
        optimizer.step(lambda inputs=inputs: script.ddp(inputs).square().mean().backward())  # type: ignore[misc]
    return script.result()


def test_a_closure_that_adds_to_gradients_of_no_sync() -> None:
    check_apart([form for form in ATTACHED if form != "dear-sharded"], closure_after_no_sync)


def body_replicas(rank: Rank, backend: str) -> float:
    """How far replicas are apart after steps towards each worker's own target."""
    rank.init()
    trainer = Trainer(rank, backend=backend, optimizer=Sharpness, lr=0.01)  # type: ignore[arg-type]
    for _ in range(20):

        def closure() -> torch.Tensor:
            trainer.optimizer.zero_grad()
            loss = (trainer.ddp(torch.ones(4, 8)) - (1.0 if rank.rank else -1.0)).square().mean()
            loss.backward()
            return loss.detach()

        closure()
        trainer.optimizer.step(closure)
    trainer.sync.wait()
    own = everywhere(flat(trainer.module))
    trainer.sync.synchronize()
    trainer.sync.detach()
    return float((own[0] - own[1]).norm())


def test_averages_outlast_a_closure_that_is_called_when_parameters_have_moved() -> None:
    rows = {backend: (backend,) for backend in ("prague", "dssync", "hop")}
    for backend, distances in row_values(body_replicas, 2, rows).items():
        assert largest(distances) < 0.3, backend  # without any average 0.9


def step_of_the_instance(script: Script) -> torch.Tensor:
    script.wrap(wide())
    optimizer = torch.optim.SGD(script.ddp.parameters(), lr=0.1, momentum=0.9)
    original = optimizer.step

    def step(closure: Any = None) -> Any:
        for parameter in script.ddp.parameters():
            parameter.grad.mul_(0.25)
        return original(closure)

    optimizer.step = step  # type: ignore[method-assign]
    script.attach(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        script.ddp(script.inputs()).square().mean().backward()
        optimizer.step()
    return script.result()


def test_a_step_that_a_script_has_put_on_the_optimizer() -> None:
    check_apart(ATTACHED, step_of_the_instance)
