"""What does a step with K-FAC cost over SGD's in one process, without a group, and what would its arithmetic alone?

The digits MLP 64-256-256-10 with 64 rows, one thread; factors in every step, inverses every 10. `bound` is SGD's step
and, on tensors of the same shapes, nothing but the arithmetic that K-FAC adds, by torch's own operations: the products
A^T A and G^T G of each layer with their running averages, G^-1 dW A^-1, and every tenth step a Cholesky factorisation
and the inverse from it for each factor. What lies above it is bookkeeping.

Checked before it is timed: the parameters after some steps are those of the same algorithm written out in float64.

    python benchmarks/kfac/kfac_alone.py
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.workloads.kfac_models import make_batch, make_model, make_optimizer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

CONTENDERS = "sgd,bound,spd"
TARGET = 1.3  # K-FAC's step over the bound's
ROWS = 64
CYCLE = 10  # steps from one update of the inverses to the next
CHECK_STEPS = 12
RATE, MOMENTUM, DECAY, DAMPING, KL_CLIP = 1e-3, 0.9, 0.95, 0.003, 0.001


class Bound:
    """The arithmetic of K-FAC's step, on operands that are made once."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = []
        self.damping: dict[int, Tensor] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                inputs, outputs = module.in_features + 1, module.out_features
                rows = [torch.randn(ROWS, width) for width in (inputs, outputs)]
                factors = [torch.eye(width) for width in (inputs, outputs)]
                inverses = [torch.eye(width) for width in (inputs, outputs)]
                self.damping |= {width: DAMPING**0.5 * torch.eye(width) for width in (inputs, outputs)}
                self.layers.append((rows, factors, inverses, torch.randn(outputs, inputs)))

    def step(self, number: int) -> None:
        for rows, factors, inverses, gradient in self.layers:
            for side in range(2):
                factors[side].addmm_(rows[side].t(), rows[side], beta=DECAY, alpha=(1 - DECAY) / ROWS)
                if number % CYCLE == 0:
                    damped = factors[side] + self.damping[len(factors[side])]
                    inverses[side] = torch.cholesky_inverse(torch.linalg.cholesky(damped))
            torch.mm(torch.mm(inverses[1], gradient), inverses[0])


class WrittenOut:
    """K-FAC in front of SGD, by its definitions, in float64."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.factors = {m: [torch.eye(n).double() for n in (m.in_features + 1, m.out_features)] for m in self.layers}
        self.inverses: dict[nn.Module, list[Tensor]] = {}
        self.steps = 0
        for module in self.layers:
            module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.inputs[module] = torch.cat([args[0].detach(), torch.ones(ROWS, 1)], 1)
        output.register_hook(lambda gradient: self.outputs.__setitem__(module, ROWS * gradient))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        product, directions = 0.0, []
        for module in self.layers:
            rows = (self.inputs[module], self.outputs[module])
            new = [part.T @ part / ROWS for part in rows]
            a, g = (DECAY * old + (1 - DECAY) * n for old, n in zip(self.factors[module], new, strict=True))
            self.factors[module] = [a, g]
            if self.steps % CYCLE == 0:
                pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
                damping = (pi * DAMPING**0.5, DAMPING**0.5 / pi)
                damped = [f + d * torch.eye(len(f)) for f, d in zip((a, g), damping, strict=True)]
                self.inverses[module] = [torch.linalg.inv(factor) for factor in damped]
            gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)
            directions.append(self.inverses[module][1] @ gradient @ self.inverses[module][0])
            product += RATE**2 * float((directions[-1] * gradient).sum())
        clip = min(1.0, (KL_CLIP / product) ** 0.5)
        for module, direction in zip(self.layers, directions, strict=True):
            module.weight.grad.copy_(clip * direction[:, :-1])
            module.bias.grad.copy_(clip * direction[:, -1])
        self.optimizer.step()
        self.steps += 1


class Contender:
    """A model, its batch, and how to make a step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = make_model("mlp")
        self.inputs, self.targets = make_batch("mlp", rank=0, rows=ROWS)
        self.bound = Bound(self.model) if name == "bound" else None
        plain = "sgd" if name == "bound" else name
        self.optimizer = make_optimizer(plain, self.model, lr=RATE, factors=1, inverses=CYCLE)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.inputs), self.targets).backward()
        if self.bound is not None:
            self.bound.step(number)
        self.optimizer.step()

    def error(self) -> float:
        """Relative distance to what the algorithm comes to in float64, after some steps."""
        start = parameters_to_vector(self.model.parameters()).detach().double()
        same = copy.deepcopy(self.model).double()
        other: Any = torch.optim.SGD(same.parameters(), lr=RATE, momentum=MOMENTUM)
        if self.name == "spd":
            other = WrittenOut(same)
        for number in range(CHECK_STEPS):
            self.step(number)
            other.zero_grad()
            nn.functional.cross_entropy(same(self.inputs.double()), self.targets).backward()
            other.step()
        with torch.no_grad():
            own, expected = (parameters_to_vector(model.parameters()).double() for model in (self.model, same))
            return float((own - expected).norm() / (expected - start).norm())

    def milliseconds(self, cycles: int) -> float:
        started = time.perf_counter()
        for number in range(CYCLE * cycles):
            self.step(number)
        return (time.perf_counter() - started) * 1e3 / (CYCLE * cycles)


def main() -> None:
    """Times all contenders in turn, and compares K-FAC with its bound."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=15)
    parser.add_argument("--cycles", type=int, default=20, help="of ten steps, in each repeat")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report(
        "kfac_alone",
        script=cli.script_line(),
        unit="ms/iteration",
        reference="bound",
        higher_is_better=False,
        conditions={"processes": 1, "threads": 1, "rows": ROWS, "factors": 1, "inverses": CYCLE},
    )
    contenders = {name: Contender(name) for name in cli.names(args.contenders)}
    checks = Checks()
    for name, contender in contenders.items():
        checks.confirm(name, contender.error(), 0.02)
    turns: dict[str, Callable[[], Any]] = {n: lambda c=c: c.milliseconds(args.cycles) for n, c in contenders.items()}
    in_turn(turns, 1)  # to warm up
    figures = in_turn(turns, 1 if args.quick else args.repeats)
    report.add("64-256-256-10", figures, checks=checks.done, target=1 / TARGET)
    for name, values in figures.items():
        over = {n: statistics.median(a / b for a, b in zip(values, figures[n], strict=True)) for n in ("sgd", "bound")}
        print(f"{name:<22} {over['sgd']:.2f} x SGD, {over['bound']:.2f} x the bound", flush=True)
    report.write(args.results)


if __name__ == "__main__":
    main()
