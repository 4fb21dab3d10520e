"""Hands placements to torch's pipelines. No other file uses names of ``torch.distributed.pipelining`` that are private.

``MISSING`` says what of them this torch lacks; it is empty for those that torchext was tested with.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.nn.parallel import DistributedDataParallel

from torchext.auto.pipeline.placement import Placement, Stage, warm_up_rows
from torchext.auto.pipeline.stage_module import StageModule

__all__ = ["MISSING", "make_schedule", "make_stage", "public_class"]

_RUNTIME: Any = getattr(schedules, "_PipelineScheduleRuntime", None)
_MIB = 1 << 20


def _missing() -> tuple[str, ...]:
    loads = getattr(_RUNTIME, "_load_csv", None)
    if loads is None:
        return ("_PipelineScheduleRuntime._load_csv",)
    if not {"filename", "format"} <= set(inspect.signature(loads).parameters):
        return ("_load_csv(filename, format)",)
    return () if hasattr(PipelineStage, "perform_reduce_grad") else ("PipelineStage.perform_reduce_grad",)


MISSING = _missing()


class _AveragingStage(PipelineStage):
    """A stage whose gradients of weights come without DDP's hooks: they are averaged when all are there.

    Of a split backward pass torch takes the weights' part with ``torch.autograd.grad``, which DDP does not see.
    """

    def __init__(self, *arguments: Any, averaged: dist.ProcessGroup, sync: Sequence[int], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._averaged, self._sync = averaged, tuple(sync)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Averages, then divides by the number of micro-batches."""
        _average(_buckets(list(self.submod.parameters()), self._sync), self._averaged)
        super().perform_reduce_grad(grad_scale_factor)


def make_stage(
    placement: Placement,
    layers: dict[str, nn.Module],
    number: int,
    group: dist.ProcessGroup,
    data: dist.ProcessGroup | None,
    *,
    offer: Callable[[], str] = str,
) -> PipelineStage:
    """A stage as torch's schedules take it.

    Args:
        placement: With this many stages.
        layers: Those of the stage.
        number: Of the stage; the rank in ``group``.
        group: Of the pipeline.
        data: Ranks that hold the same stage; None where there is one.
        offer: Says what to do where this torch lacks what the plan needs.

    Raises:
        ValueError: It does.
    """
    stage = placement.stages[number]
    splits = any("W" in entry for entry in placement.table[number])
    module: nn.Module = StageModule(layers, number, recompute=stage.recompute, splits_backward=splits)
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    options: dict[str, Any] = {"device": device, "group": group}
    places = (number, len(placement.stages))
    trained = any(parameter.requires_grad for parameter in parameters)
    if data is None or data.size() == 1 or not trained:
        return PipelineStage(module, *places, **options)
    # The first stage takes its whole backward pass as W, and by autograd's engine: DDP sees that.
    if splits and number > 0:
        _refuse_missing(placement, offer)
        for tensor in [*parameters, *module.buffers()]:
            dist.broadcast(tensor.detach(), group=data, group_src=0)
        return _AveragingStage(module, *places, averaged=data, sync=stage.sync, **options)
    wrapped = DistributedDataParallel(
        module, process_group=data, gradient_as_bucket_view=True, **_bucket_options(stage)
    )
    # A stage's forwards are under no_sync, and its last backward arms the reducer. The forward by which torch learns
    # shapes is not: it would arm the reducer for the first backward, too.
    wrapped.require_backward_grad_sync = False
    wrapped.require_forward_param_sync = False
    wrapped._torchext_pipeline_stage = number  # type: ignore[assignment]  # attach refuses it
    return PipelineStage(wrapped, *places, **options)


def make_schedule(
    placement: Placement,
    stage: PipelineStage,
    loss_fn: Callable[..., torch.Tensor],
    *,
    scale_grads: bool = True,
    offer: Callable[[], str] = str,
) -> Any:
    """The schedule that runs a placement's table.

    Raises:
        ValueError: This torch lacks what runs such a table.
    """
    options: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": scale_grads}
    public = public_class(placement)
    # The class for 1F1B waits for what it sends, and the table does not.
    if public == "ScheduleGPipe" or (MISSING and public == "Schedule1F1B"):
        kind = ScheduleGPipe if public == "ScheduleGPipe" else Schedule1F1B
        return kind(stage, placement.microbatches, **options)
    _refuse_missing(placement, offer)
    schedule = _RUNTIME([stage], placement.microbatches, **options)
    with tempfile.TemporaryDirectory(prefix="torchext-pipeline-") as folder:
        path = Path(folder) / "table.csv"
        path.write_text(placement.csv())
        schedule._load_csv(str(path), format="compute_only")
    return schedule


def public_class(placement: Placement) -> str | None:
    """The public class of torch's that takes the same order, if there is one."""
    stages, microbatches = len(placement.stages), placement.microbatches
    if placement.is_gpipe:
        return "ScheduleGPipe"
    if microbatches >= stages and placement.table == warm_up_rows(range(stages, 0, -1), microbatches):
        return "Schedule1F1B"
    return None


def _refuse_missing(placement: Placement, offer: Callable[[], str]) -> None:
    if MISSING:
        raise ValueError(
            f"torchext.auto.pipeline: torch {torch.__version__} lacks {MISSING[0]}, which runs the plan's order "
            f"({placement.order}); {offer()}"
        )


def _bucket_options(stage: Stage) -> dict[str, Any]:
    """Of DDP: the plan's buckets, or the largest where this torch takes no list."""
    if not stage.sync:
        return {}
    sizes = [max(1, nbytes) / _MIB for nbytes in stage.sync]
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters:
        return {"bucket_cap_mb_list": sizes}
    return {"bucket_cap_mb": max(sizes)}


def _buckets(parameters: list[nn.Parameter], sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    """Gradients from the last to the first, of one type in a bucket; a bucket ends when it has its size."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for parameter in reversed(parameters):
        if parameter.grad is None:
            continue
        if room <= 0 or buckets[-1][0].dtype != parameter.grad.dtype:
            room = sizes[min(len(buckets), len(sizes) - 1)] if sizes else 25 * _MIB
            buckets.append([])
        buckets[-1].append(parameter.grad)
        room -= parameter.grad.nbytes
    return buckets


def _average(buckets: list[list[torch.Tensor]], group: dist.ProcessGroup) -> None:
    flat = [torch.cat([gradient.flatten() for gradient in bucket]) for bucket in buckets]
    for work in [dist.all_reduce(values, group=group, async_op=True) for values in flat]:
        work.wait()
    for values, bucket in zip(flat, buckets, strict=True):
        values /= group.size()
        for gradient, part in zip(bucket, torch.split(values, [one.numel() for one in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
