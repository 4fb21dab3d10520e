"""How fast is a training step of AdaptiveEmbeddingBag on a GPU?

A table of 1,000,000 x 64 float32, 8,192 bags of 20 uniform ids, mode sum: forward, backward and update.

    torch      nn.EmbeddingBag(sparse=True) and SGD
    whole      AdaptiveEmbeddingBag, everything resident, fused row-wise Adagrad
    quarter    a quarter of 4 chunks a row resident, in the direct layout, utilities collected
    skewed     as whole; half of all ids are one of ten rows

    python benchmarks/embedding/embedding_cuda.py

Without a GPU it says so and measures nothing; --device cpu shows that it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from torch import Tensor

from torchext.nn import AdaptiveEmbeddingBag

ROWS, DIM, BAGS, LENGTH, CHUNK, LR = 1_000_000, 64, 8192, 20, 16, 0.01


def gradient(ids: Tensor, upstream: Tensor) -> Tensor:
    """Of the whole table, in float64."""
    return torch.zeros(ROWS, DIM, dtype=torch.float64).index_add_(0, ids, upstream.repeat_interleave(LENGTH, 0))


class Contender:
    """A table, its ids, and how to make a step."""

    def __init__(self, name: str, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.name, self.device = name, device
        self.width = CHUNK if name == "quarter" else DIM
        self.bag: torch.nn.Module
        if name == "torch":
            self.bag = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, device=device)
        else:
            budget = 0.25 if name == "quarter" else 1.0
            self.bag = AdaptiveEmbeddingBag(
                ROWS, DIM, mode="sum", training="fused", lr=LR, budget=budget, chunk_dim=self.width, device=device
            )
            self.bag._take(torch.randn(ROWS, DIM, generator=generator))  # a random quarter is resident
        self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=LR) if name == "torch" else None
        ids = torch.randint(0, ROWS, (BAGS * LENGTH,), generator=generator)
        if name == "skewed":
            popular = torch.rand(len(ids), generator=generator) < 0.5
            ids = torch.where(popular, ids % 10, ids)
        self.ids, self.upstream = ids.to(device), torch.randn(BAGS, DIM, generator=generator).to(device)
        self.offsets = torch.arange(0, BAGS * LENGTH, LENGTH, device=device)

    def step(self) -> None:
        self.bag(self.ids, self.offsets).backward(self.upstream)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def error(self) -> float:
        """How far the first step's new rows are from those computed in float64."""
        before = self.bag.weight.detach().double().cpu().clone()
        self.step()
        parts = gradient(self.ids.cpu(), self.upstream.double().cpu()).view(-1, self.width)
        if self.optimizer is None:
            parts = parts / (parts.square().mean(1, keepdim=True).sqrt() + 1e-8)
        present = before.view(-1, self.width).abs().sum(1, keepdim=True) > 0
        expected = before - (LR * parts * present).view(ROWS, DIM)
        return float((self.bag.weight.detach().double().cpu() - expected).abs().max())

    def milliseconds(self, steps: int) -> float:
        """Of one step; the device is waited for at the end only."""
        wait: Callable[[], None] = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait()
        return (time.perf_counter() - started) * 1e3 / steps


def main() -> None:
    """Checks the first step of every contender, then times them in turn."""
    parser = cli.parser(__doc__ or "", contenders="torch,whole,quarter,skewed", repeats=9)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("embedding_cuda: no GPU is visible, nothing is measured")
        return
    repeats, steps = (2, 2) if arguments.quick else (arguments.repeats, 50)
    checks = Checks()
    contenders = {name: Contender(name, device) for name in cli.names(arguments.contenders)}
    for name, contender in contenders.items():
        checks.confirm(name, contender.error(), 1e-4)
        contender.milliseconds(3)
    report = Report(
        "embedding_cuda",
        script=cli.script_line(),
        unit="ms",
        reference="torch",
        higher_is_better=False,
        conditions={"rows": ROWS, "dim": DIM, "bags": BAGS, "ids a bag": LENGTH, "steps a repeat": steps}
        | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"},
    )
    figures = in_turn({name: lambda c=c: c.milliseconds(steps) for name, c in contenders.items()}, repeats)
    report.add("a training step", figures, checks=checks.done)
    report.write(arguments.results)


if __name__ == "__main__":
    main()
