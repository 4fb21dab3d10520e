"""Measures what torch's runtime takes for an action beside the layers: a stage that does nothing, on one rank."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from torchext.auto.pipeline import torch_runtime
from torchext.auto.pipeline.placement import Placement
from torchext.auto.step_profile import Stopwatch

__all__ = ["action_overhead"]

_MICROBATCHES = 16
_STEPS = 5


class _Empty(nn.Module):
    """One multiplication, so that there is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def action_overhead(device: torch.device) -> float:
    """Seconds that a forward or a backward action takes without layers, in the median step. Local."""
    placement = Placement.by_depth([1], [1], _MICROBATCHES)
    x = torch.zeros(_MICROBATCHES, device=device)
    watch = Stopwatch(device)
    seconds = []
    with _group_of_one() as group, torch.enable_grad():
        stage = torch_runtime.make_stage(placement, {"empty": _Empty().to(device)}, 0, group, None)
        schedule = torch_runtime.make_schedule(placement, stage, lambda out, target: out.sum())
        for _ in range(_STEPS + 1):
            begin = watch.mark()
            schedule.step(x, target=x)
            end = watch.mark()
            watch.wait()
            seconds.append(watch.seconds(begin, end))
    return statistics.median(seconds[1:]) / (2 * _MICROBATCHES)


@contextlib.contextmanager
def _group_of_one() -> Iterator[dist.ProcessGroup]:
    """This rank alone: beside the groups that are there, and without a call by other ranks."""
    if dist.is_initialized():
        made = group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        made, group = None, dist.distributed_c10d._get_default_group()
    try:
        yield group
    finally:
        dist.destroy_process_group(made)
