"""Are the multi-tensor operators faster than torch's own ways of moving a model in and out of one flat buffer?

A model's tensors (the 161 shapes of ResNet-50, 25.6 million elements; and 400 small ones, 0.4 million) are gathered
into a flat buffer, and a sum in the buffer is scattered back divided by a group's size. Contenders:

    foreach    torch._foreach_copy_ into the buffer's views; torch._foreach_copy_ out of them, then torch._foreach_mul_
    torchext   torchext.ops.multi_tensor_flatten; multi_tensor_average_, one pass

    python benchmarks/kernels/kernels_multi_tensor.py
    python benchmarks/kernels/kernels_multi_tensor.py --device cuda
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from torch import Tensor

from torchext import ops

SCALE = 1 / 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Rounding after each of two passes instead of one costs foreach half a unit more.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Parameter shapes of ResNet-50, in its order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "ResNet-50": resnet50_shapes(),
    "400 small": [(256 * (1 + i % 7),) for i in range(400)],
}


class Contender:
    """One way of doing both directions, on tensors and a buffer of its own."""

    def __init__(self, name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        self.flat = torch.empty(sum(t.numel() for t in self.tensors), dtype=dtype, device=device)
        pieces = self.flat.split([t.numel() for t in self.tensors])
        self.views = [piece.view(t.shape) for piece, t in zip(pieces, self.tensors, strict=True)]
        self.calls: dict[str, Callable[[], None]] = {
            "foreach": {"flatten": self._foreach_flatten, "average": self._foreach_average},
            "torchext": {"flatten": self._flatten, "average": self._average},
        }[name]

    def _foreach_flatten(self) -> None:
        torch._foreach_copy_(self.views, self.tensors)

    def _foreach_average(self) -> None:
        torch._foreach_copy_(self.tensors, self.views)
        torch._foreach_mul_(self.tensors, SCALE)

    def _flatten(self) -> None:
        ops.multi_tensor_flatten(self.tensors, self.flat)

    def _average(self) -> None:
        ops.multi_tensor_average_(self.tensors, self.flat, scale=SCALE)

    def error(self, direction: str) -> float:
        """Runs a direction once and returns its largest error against a reference in float64."""
        source = [t.double() for t in self.tensors]
        if direction == "flatten":
            self.flat.fill_(float("nan"))
            self.calls[direction]()
            expected: Tensor = torch.cat([t.reshape(-1) for t in source])
            return float((self.flat.double() - expected).abs().max())
        expected = self.flat.double() * SCALE
        self.calls[direction]()
        got = torch.cat([t.double().reshape(-1) for t in self.tensors])
        for tensor, before in zip(self.tensors, source, strict=True):
            tensor.copy_(before)
        return float(((got - expected).abs() / expected.abs().clamp(min=1)).max())

    def milliseconds(self, direction: str, calls: int) -> float:
        """Returns the time of one call, the median of several."""
        taken = []
        for _ in range(calls):
            started = time.perf_counter()
            self.calls[direction]()
            if self.flat.is_cuda:
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - started) * 1e3)
        return statistics.median(taken)


def main() -> None:
    """Checks and times every model, type and direction."""
    parser = cli.parser(__doc__ or "", contenders="foreach,torchext", repeats=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    repeats, calls = (2, 2) if arguments.quick else (arguments.repeats, 5)
    report = Report(
        "kernels_multi_tensor" if device == "cpu" else "kernels_multi_tensor_cuda",
        script=cli.script_line(),
        unit="ms",
        reference="foreach",
        higher_is_better=False,
        conditions={"threads": torch.get_num_threads(), "scale": SCALE, "calls a repeat": calls}
        | {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"},
    )
    for model, shapes in MODELS.items():
        for label, dtype in DTYPES.items():
            contenders = {name: Contender(name, shapes, dtype, device) for name in cli.names(arguments.contenders)}
            for direction in ("flatten", "average"):
                checks = Checks()
                for name, contender in contenders.items():
                    tolerance = TOLERANCE[label] if direction == "average" else 0.0
                    checks.confirm(name, contender.error(direction), tolerance)
                    contender.milliseconds(direction, 2)  # pages touched, threads started
                figures = in_turn(
                    {n: lambda c=c: c.milliseconds(direction, calls) for n, c in contenders.items()},  # noqa: B023
                    repeats,
                )
                report.add(f"{direction}, {model}, {label}", figures, checks=checks.done)
    report.write(arguments.results)


if __name__ == "__main__":
    main()
