"""What does a training step with K-FAC cost over SGD's on one GPU?

An MLP of eight layers 1024 wide and ResNet-20 on 32 x 32 images, 64 rows, float32; factors every 10 steps and
inverses every 100, whole intervals. One process, so nothing travels: what is timed is the queue of kernels.

    sgd      torch.optim.SGD with momentum
    kfac     torchext.optim.KFAC

    python benchmarks/kfac/kfac_step_cuda.py

Without a GPU it says so and measures nothing; --device cpu shows that it runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.workloads.kfac_models import make_batch, make_model
from torch import nn

from torchext.optim import KFAC

ROWS = 64
CHECK_STEPS = 12
OPTIONS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}


class Contender:
    """A model, its batch, and how to make a step."""

    def __init__(self, name: str, model: str, device: torch.device, inverses: int) -> None:
        self.model = make_model(model).to(device)
        self.batch = [part.to(device) for part in make_batch(model, rank=0, rows=ROWS)]
        self.inverses = inverses
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.model.parameters(), fused=True, **OPTIONS)
            if name == "sgd"
            else KFAC(
                self.model,
                factor_update_steps=max(1, inverses // 10),
                inverse_update_steps=inverses,
                **OPTIONS,
            )
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()

    def way(self) -> torch.Tensor:
        """Of the parameters, in some steps."""
        before = [p.detach().clone() for p in self.model.parameters()]
        for _ in range(CHECK_STEPS):
            self.step()
        ways = [(p.detach() - old).reshape(-1) for p, old in zip(self.model.parameters(), before, strict=True)]
        return torch.cat(ways).double().cpu()

    def milliseconds(self) -> float:
        """Of a step; the device is waited for at the end only."""
        if self.batch[0].is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(self.inverses):
            self.step()
        if self.batch[0].is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3 / self.inverses


def main() -> None:
    """Checks every contender against the CPU, then times them in turn."""
    parser = cli.parser(__doc__ or "", contenders="sgd,kfac", repeats=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="wide8,resnet20")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("kfac_step_cuda: no GPU is visible, nothing is measured")
        return
    repeats, inverses = (1, 10) if arguments.quick else (arguments.repeats, 100)
    report = Report(
        "kfac_step_cuda",
        script=cli.script_line(),
        unit="ms",
        reference="sgd",
        higher_is_better=False,
        conditions={"rows": ROWS, "factors": max(1, inverses // 10), "inverses": inverses}
        | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"},
    )
    for model in cli.names(arguments.models):
        checks = Checks()
        contenders = {}
        for name in cli.names(arguments.contenders):
            contenders[name] = Contender(name, model, device, inverses)
            # The same steps on the CPU; not in TF32, which cuDNN rounds convolutions to unless told not to.
            expected = Contender(name, model, torch.device("cpu"), inverses).way()
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                found = contenders[name].way()
            error = float((found - expected).norm() / expected.norm())
            checks.confirm(name, error, 0.02)
        figures = in_turn({name: c.milliseconds for name, c in contenders.items()}, repeats)
        report.add(f"{model}, {ROWS} rows", figures, checks=checks.done)
    report.write(arguments.results)


if __name__ == "__main__":
    main()
