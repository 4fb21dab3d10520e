"""A stage of a pipeline on this rank, whatever its layers: runs a plan's steps, and times them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from torchext.auto.pipeline import PipelinePlan


class PlannedStage:
    """This rank's stage of a plan, with its schedule and one batch.

    Args:
        plan: One stage a rank.
        model: All layers.
        loss_of: Of outputs and targets.
        inputs: Of a step.
        target: Of a step.
        of_torch: Runs torch's Schedule1F1B, which waits for its sends, and not the plan's table.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        model: nn.Sequential,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        target: torch.Tensor,
        *,
        of_torch: bool = False,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._stage = plan.stage(model, world)
        self._schedule: Any = (
            Schedule1F1B(self._stage, plan.placement.microbatches, loss_of)
            if of_torch
            else plan.schedule(self._stage, loss_of)
        )
        self._inputs = [inputs] if self._stage.is_first else []
        self._target = target if self._stage.is_last else None

    @property
    def layers(self) -> nn.Module:
        """Those of this rank."""
        return self._stage.submod

    def step(self) -> None:
        """Runs the passes of one step."""
        self._schedule.step(*self._inputs, target=self._target, return_outputs=False)

    def clear(self) -> None:
        """Drops the gradients."""
        for parameter in self.layers.parameters():
            parameter.grad = None

    def measure(self, steps: int) -> float:
        """Returns the milliseconds of the median step; of each step the slowest rank counts."""
        times = []
        for _ in range(steps):
            self.clear()
            dist.barrier()
            begin = time.perf_counter()
            self.step()
            taken = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times.append(1e3 * taken.item())
        return statistics.median(times)
