"""Emulated compute: a model that takes the time of a forward and a backward pass and none of the processor.

Many ranks on few cores cannot compute at the same time, but they can sleep at the same time. Each layer sleeps its
share in forward and in backward (``time.sleep`` releases the GIL, and the core, as waiting for an accelerator
does) and hands autograd a real, constant parameter gradient, so that DDP's buckets become ready one after the other,
as in a real backward pass.

Time: a layer's work ends a fixed span after the layer began. What the system wakes a sleeper too late is taken off
the next sleep, so the step does not drift; what DDP or a backend does *between* layers is not hidden, and is theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class SleepClock:
    """Sleeps given spans, and keeps the account; one a model, used by one thread at a time.

    Attributes:
        factor: All spans are multiplied by it (a straggler has more than 1).
        target_s: Sum of the spans asked for, in seconds.
        taken_s: Sum of the time the spans took; ``taken_s - target_s`` is the drift.
        latest_s: The longest that one wake-up came late.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._debt_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Begins a new account."""
        self.target_s = self.taken_s = self.latest_s = 0.0

    def work(self, begin: float, span_s: float) -> None:
        """Sleeps until ``span_s * factor`` seconds after ``begin``, less what earlier calls returned too late.

        Args:
            begin: When the work began, by ``time.perf_counter()``.
            span_s: How long it takes.
        """
        span_s *= self.factor
        deadline = begin + span_s - self._debt_s
        delay = deadline - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        end = time.perf_counter()
        late = max(0.0, end - deadline)
        # Never more than the next layer can give back: a rank that lost the core for long did lose that time.
        self._debt_s = min(late, span_s)
        self.target_s += span_s
        self.taken_s += end - begin
        self.latest_s = max(self.latest_s, late)


class _Layer(nn.Module):
    """One emulated layer: a flat float32 parameter, and the two spans it takes."""

    def __init__(self, numel: int, forward_s: float, backward_s: float, clock: SleepClock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.forward_s, self.backward_s, self.clock = forward_s, backward_s, clock
        self.gradient_value = 1.0
        self.label = ""
        self._gradient = torch.empty(0)
        self._filled: tuple[float, int] | None = None

    def gradient(self) -> torch.Tensor:
        """Returns the constant gradient, without work while nobody has written into it.

        A new tensor object over one lasting buffer: autograd's accumulator takes it over without a copy, where
        it would clone a tensor that somebody else holds or an expanded scalar (1 ms for 4 MB of fresh pages).
        """
        held = self.weight.grad is not None and self.weight.grad.data_ptr() == self._gradient.data_ptr()
        if held or self._gradient.shape != self.weight.shape:  # held: gradients are being accumulated in the old one
            self._gradient, self._filled = torch.empty_like(self.weight, requires_grad=False), None
        if self._filled != (self.gradient_value, self._gradient._version):
            self._gradient.fill_(self.gradient_value)  # DDP wrote the average into it, say
            self._filled = (self.gradient_value, self._gradient._version)
        return self._gradient.detach()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Sleep.apply(hidden, self.weight, self)
        return output


def _range(what: str, layer: _Layer) -> contextlib.AbstractContextManager[Any]:
    # Only where a picture is wanted: a range costs some microseconds even when nobody records.
    return torch.profiler.record_function(f"{what} {layer.label}") if layer.label else contextlib.nullcontext()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, layer: _Layer) -> torch.Tensor:
        begin = time.perf_counter()  # what the emulation computes itself is covered by the span
        ctx.layer = layer
        with _range("forward", layer):
            output = hidden.clone()
            layer.clock.work(begin, layer.forward_s)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        begin = time.perf_counter()
        layer: _Layer = ctx.layer
        with _range("backward", layer):
            gradient = layer.gradient()
            layer.clock.work(begin, layer.backward_s)
        return gradients[0], gradient, None


class EmulatedModel(nn.Module):
    """Layers that sleep; ``model(torch.zeros(1)).sum().backward()`` is one step's compute.

    Args:
        layers: Number of layers, each with one parameter.
        parameter_bytes: Of all layers together (float32).
        forward_ms: Of the whole forward pass, split evenly over the layers.
        backward_ms: Of the whole backward pass, split evenly over the layers.
        growth: The last layer has ``1 + growth`` times the parameters of the first; 0 is uniform.
        sizes: How many parameters each layer has, in place of ``growth``; they need not add up to ``parameter_bytes``,
            only their proportions count.
    """

    def __init__(
        self,
        *,
        layers: int,
        parameter_bytes: int,
        forward_ms: float,
        backward_ms: float,
        growth: float = 0.0,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if layers < 1 or parameter_bytes < 4 * layers or forward_ms < 0 or backward_ms < 0 or growth < 0:
            raise ValueError(
                "emulated model: need layers >= 1, 4 bytes a layer, times and growth >= 0; "
                f"got {layers=}, {parameter_bytes=}, {forward_ms=}, {backward_ms=}, {growth=}"
            )
        if sizes is not None and (len(sizes) != layers or min(sizes) < 1 or growth):
            raise ValueError(
                f"emulated model: sizes must be {layers} numbers of at least 1, without growth; got {sizes=}, {growth=}"
            )
        self.clock = SleepClock()
        self.step_ms = forward_ms + backward_ms
        self.body = nn.Sequential(
            *(
                _Layer(numel, forward_ms / layers / 1e3, backward_ms / layers / 1e3, self.clock)
                for numel in layer_sizes(layers, parameter_bytes // 4, growth, sizes)
            )
        )

    def set_gradient(self, value: float) -> None:
        """Sets what every element of every parameter's gradient is from now on."""
        for layer in self.body:
            assert isinstance(layer, _Layer)
            layer.gradient_value = value

    def annotate(self) -> None:
        """From now on the profiler sees ranges ``forward 0``, ``backward 0`` and so on, by the number of the layer."""
        for index, layer in enumerate(self.body):
            assert isinstance(layer, _Layer)
            layer.label = str(index)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Passes a tensor of any shape through, after ``forward_ms``."""
        output: torch.Tensor = self.body(hidden)
        return output


def layer_sizes(layers: int, numel: int, growth: float, sizes: Sequence[int] | None = None) -> list[int]:
    """Splits ``numel`` elements over the layers, as ``sizes`` are to each other, or growing linearly by ``growth``.

    What is returned adds up exactly.
    """
    weights: Sequence[float] = sizes or [1 + growth * index / max(1, layers - 1) for index in range(layers)]
    marks = [round(numel * sum(weights[:index]) / sum(weights)) for index in range(layers + 1)]
    return [max(1, upper - lower) for lower, upper in itertools.pairwise(marks)]


# He et al. 2016, table 1: blocks of each stage, by the number of layers.
_RESNETS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet_sizes(layers: int) -> list[int]:
    """Returns the elements of the weights of ResNet-50, -101 or -152, first layer first (4 more: projections)."""
    sizes, width = [3 * 64 * 7 * 7], 64
    for planes, blocks in zip((64, 128, 256, 512), _RESNETS[layers], strict=True):
        for block in range(blocks):
            sizes += [width * planes, planes * planes * 3 * 3, planes * 4 * planes]
            if block == 0:
                sizes.append(width * 4 * planes)  # the projection beside the stage's first block
            width = 4 * planes
    return [*sizes, 1000 * width]


@dataclass(frozen=True)
class Overhead:
    """What the emulation itself costs, without DDP, per step.

    Attributes:
        step_ms: Median time of a step, of forward, backward and nothing else.
        target_ms: What it should be.
        cpu_ms: Processor time, all threads of the process.
        drift: Share by which the mean step is too long.
        latest_ms: The worst single wake-up.
    """

    step_ms: float
    target_ms: float
    cpu_ms: float
    drift: float
    latest_ms: float


def measure_overhead(model: EmulatedModel, *, steps: int = 40) -> Overhead:
    """Times ``steps`` steps of ``model`` after two of warm-up."""
    durations = []
    cpu_begin = 0.0
    for step in range(steps + 2):
        if step == 2:
            model.clock.reset()
            cpu_begin = time.process_time()
        begin = time.perf_counter()
        model.zero_grad()
        model(torch.zeros(1)).sum().backward()
        if step >= 2:
            durations.append(time.perf_counter() - begin)
    cpu_ms = (time.process_time() - cpu_begin) * 1e3 / steps
    mean_ms = sum(durations) * 1e3 / steps
    return Overhead(
        step_ms=sorted(durations)[steps // 2] * 1e3,
        target_ms=model.step_ms,
        cpu_ms=cpu_ms,
        drift=mean_ms / model.step_ms - 1 if model.step_ms else 0.0,
        latest_ms=model.clock.latest_s * 1e3,
    )
