"""Pipelines of layers that sleep: a plan as torch runs it, with the time of compute and none of the processor."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lab.workloads.emulated import SleepClock
from lab.workloads.planned_stage import PlannedStage
from torchext.auto import pipeline
from torchext.auto.pipeline import LayerProfile, PipelinePlan

KEPT_BYTES = 1_000  # of a layer and a micro-batch, as the planner counts: nothing is kept
TOLERANCE = 1e-5


class _Input(torch.autograd.Function):
    """Sleeps for the forward pass, and for the gradient of the input; hands numbers on without a copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: SleepClock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.work(time.perf_counter(), seconds)
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.clock.work(time.perf_counter(), ctx.seconds)
        return gradient, None, None


class _Weight(torch.autograd.Function):
    """Sleeps for the gradient of the weight, which is 1."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, clock: SleepClock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.clock.work(time.perf_counter(), ctx.seconds)
        return torch.ones(()), None, None


class _Joined(torch.autograd.Function):
    """Where both meet: torch starts the gradients of weights here when it takes them apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.new_zeros(())


class SleepingLayer(nn.Module):
    """Takes the time of three passes, and none of the processor."""

    def __init__(self, clock: SleepClock, seconds: float) -> None:
        super().__init__()
        self.weight, self.clock, self.seconds = nn.Parameter(torch.zeros(())), clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Input.apply(x, self.clock, self.seconds)
        return _Joined.apply(x, _Weight.apply(self.weight, self.clock, self.seconds))


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns a loss that takes little time, whatever the size of an activation."""
    return out[..., :1].sum()


def sleeping_model(layers: int, layer_ms: float) -> nn.Sequential:
    """Returns layers that sleep so long in each of their three passes, by one clock."""
    clock = SleepClock()
    return nn.Sequential(*(SleepingLayer(clock, layer_ms / 1e3) for _ in range(layers)))


def profile_of_first(layers: int, layer_ms: float, numbers: int) -> LayerProfile:
    """Returns the layers as rank 0 has measured them. Collective."""
    box: list[LayerProfile | None] = [None]
    if dist.get_rank() == 0:
        found = pipeline.profile(sleeping_model(layers, layer_ms), torch.zeros(1, numbers))
        box[0] = replace(found, layers=tuple(replace(layer, kept_bytes=KEPT_BYTES) for layer in found.layers))
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


class SleepingPipeline(PlannedStage):
    """This rank's stage of a plan of sleeping layers.

    Args:
        plan: One stage a rank.
        layer_ms: Of each pass of a layer.
        numbers: In an activation.
        of_torch: As of PlannedStage.
    """

    def __init__(self, plan: PipelinePlan, layer_ms: float, numbers: int, *, of_torch: bool = False) -> None:
        model = sleeping_model(len(plan.profile.layers), layer_ms)
        x = torch.zeros(plan.placement.microbatches, numbers)
        super().__init__(plan, model, loss_of, x, x, of_torch=of_torch)

    def error(self) -> float:
        """Returns how far a weight's gradient is off after one step, the worst of all ranks."""
        self.clear()
        self.step()
        gradients = [p.grad if p.grad is not None else torch.full((), torch.inf) for p in self.layers.parameters()]
        worst = torch.stack([(gradient - 1).abs() for gradient in gradients]).max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)
