"""Asks the core: the search over stages, depths and orders, and the simulator that predicts one placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchext import _C
from torchext.auto.link_model import FORMULA, LinkModel
from torchext.auto.pipeline.layer_profile import LayerProfile
from torchext.auto.pipeline.placement import Placement, Stage, action, parsed

__all__ = ["Alternative", "Found", "Options", "Point", "Prediction", "Span", "plan", "predict"]


@dataclass(frozen=True)
class Alternative:
    """What else was tried.

    Args:
        name: Stages, ranks and order.
        seconds: Predicted, of a step; None where it does not fit.
        reason: Why it is not the plan.
    """

    name: str
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class Point:
    """One plan of the frontier: none is as fast with as little memory.

    Args:
        memory: Bytes that the fullest rank takes.
        seconds: Predicted, of a step.
        sizes: Of each stage how many layers it has.
        depths: Of each stage the most micro-batches in flight.
        schedule: ``"1f1b"``, ``"gpipe"`` or ``"zero-bubble"``.
        data: Ranks that have the same stage.
    """

    memory: int
    seconds: float
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    schedule: str
    data: int


@dataclass(frozen=True)
class Options:
    """What is asked of the search; arguments of :func:`torchext.auto.pipeline.plan`."""

    world_size: int
    microbatches: int
    memory: int | None
    schedules: tuple[str, ...]
    stages: int | None
    state_factor: float
    recompute: bool


@dataclass(frozen=True)
class Found:
    """What the search has found.

    Args:
        placement: Which layers stand on which rank, and in which order they work.
        seconds: Predicted, of a step without the optimizer.
        bubble: Predicted, the share of all ranks' time in which they wait.
        peak_bytes: Of each stage, planned: parameters with their state, and activations.
        exhaustive: Whether every way to cut the layers was tried.
        alternatives: What else was tried, the best first.
        points: None is as fast with as little memory; memory rises, and time falls.
    """

    placement: Placement
    seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]
    exhaustive: bool
    alternatives: tuple[Alternative, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Span:
    """Something that takes time in a predicted step.

    Args:
        rank: Of the pipeline.
        kind: ``"F"``, ``"B"``, ``"I"``, ``"W"``; of a transfer ``"SEND_F"`` or ``"SEND_B"``.
        microbatch: Of it.
        begin: Seconds from the start of the step.
        end: Likewise.
    """

    rank: int
    kind: str
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Args:
        seconds: Of the step without the optimizer.
        bubble: Share of all ranks' time in which they wait.
        peak_bytes: Of each stage.
        spans: Work of the ranks.
        transfers: Between them.
    """

    seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...]


def plan(profile: LayerProfile, link: LinkModel, options: Options, *, tensor: int = 1) -> Found:
    """The best placement of a profile's layers.

    Raises:
        ValueError: Nothing fits into the memory, with the least that would.
    """
    world_size = options.world_size // tensor
    core_options = _C.PipelineOptions(
        world_size=world_size,
        microbatches=options.microbatches,
        memory_nbytes=options.memory,
        schedules=list(options.schedules),
        stages=options.stages,
        state_factor=options.state_factor,
        recompute=options.recompute,
        overhead_seconds=profile.overhead,
        split_data_parallel=True,  # torch_runtime averages what DDP does not see
    )
    widths = [data for data in range(1, world_size + 1) if world_size % data == 0]
    found = _C.plan_pipeline(_layers(profile), _link(link, widths), core_options)
    stages = tuple(
        Stage(
            first=stage.first,
            last=stage.last,
            data=stage.data,
            tensor=tensor,
            depth=stage.depth,
            recompute=stage.recompute,
            sync=_bucket_bytes(profile, stage.last, stage.bucket_ends),
        )
        for stage in found.stages
    )
    rows = tuple(tuple(action(stage, kind, batch) for kind, stage, batch in row) for row in found.table)
    return Found(
        placement=Placement(stages, found.microbatches, found.order, rows),
        seconds=found.seconds,
        bubble=found.bubble,
        peak_bytes=tuple(round(stage.peak_nbytes) for stage in found.stages),
        exhaustive=found.exhaustive,
        alternatives=tuple(
            Alternative(one.name, one.seconds if math.isfinite(one.seconds) else None, one.reason)
            for one in found.alternatives
        ),
        points=tuple(
            Point(round(p.memory_nbytes), p.seconds, tuple(p.sizes), tuple(p.depths), p.order, p.data)
            for p in found.frontier
        ),
    )


def predict(
    profile: LayerProfile,
    link: LinkModel,
    placement: Placement,
    *,
    state_factor: float = 4.0,
    mode: str | None = None,
) -> Prediction:
    """One step of a placement; without a mode, as what runs it posts receives and waits for sends.

    Raises:
        ValueError: An unknown mode, or one that does not fit the order.
    """
    data = max(stage.data for stage in placement.stages)
    options = _C.PipelineOptions(
        world_size=data * len(placement.stages),
        microbatches=data * placement.microbatches,
        stages=len(placement.stages),
        state_factor=state_factor,
        overhead_seconds=profile.overhead,
    )
    sizes = [stage.size for stage in placement.stages]
    recompute = [stage.recompute for stage in placement.stages]
    times = _C.pipeline_stage_times(_layers(profile), _link(link, [data]), options, sizes, recompute)
    table = [[(kind, stage, batch) for stage, kind, batch in map(parsed, row)] for row in placement.table]
    run = _C.simulate_pipeline(times, table, mode or ("class" if placement.is_gpipe else "torch"), True)
    return Prediction(
        seconds=run.seconds,
        bubble=run.bubble,
        peak_bytes=tuple(
            _peak_bytes(profile, stage, depth, state_factor)
            for stage, depth in zip(placement.stages, run.most_in_flight, strict=True)
        ),
        spans=_spans(run.spans),
        transfers=_spans(run.transfers),
    )


def _layers(profile: LayerProfile) -> list[_C.PipelineLayer]:
    return [
        _C.PipelineLayer(
            forward_seconds=layer.forward,
            backward_input_seconds=layer.backward_input,
            backward_weight_seconds=layer.backward_weight,
            kept_nbytes=layer.kept_bytes,
            output_nbytes=layer.output_bytes,
            parameter_nbytes=layer.parameter_bytes,
        )
        for layer in profile.layers
    ]


def _link(link: LinkModel, widths: Sequence[int]) -> _C.PipelineLink:
    reduced = {width: _C.CostTable(_all_reduce(link, width)) for width in widths if width > 1}
    sent = link.tables.get("p2p")
    shared = link.backend != FORMULA  # a formula knows no ports
    if sent is not None:
        return _C.PipelineLink(transfer=_C.CostTable(sent.points), all_reduce=reduced, shared_ports=shared)
    return _C.PipelineLink.straight(
        latency_seconds=link.latency_seconds,
        bytes_per_second=link.bytes_per_second,
        all_reduce=reduced,
        shared_ports=shared,
    )


def _all_reduce(link: LinkModel, width: int) -> Sequence[tuple[int, float]]:
    scaled = link if width == link.world_size else link.with_ranks(width)
    return scaled.tables["all_reduce"].points


def _bucket_bytes(profile: LayerProfile, last: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Of each bucket; ends count layers from the stage's last one to its first."""
    sizes = [profile.layers[last - place].parameter_bytes for place in range(ends[-1] if ends else 0)]
    return tuple(total for a, b in itertools.pairwise([0, *ends]) if (total := sum(sizes[a:b])) > 0)


def _peak_bytes(profile: LayerProfile, stage: Stage, depth: int, state_factor: float) -> int:
    layers = profile.layers[stage.first : stage.last + 1]
    kept = sum(layer.kept_bytes for layer in layers)
    static = round(state_factor * sum(layer.parameter_bytes for layer in layers))
    if stage.recompute:
        return static + depth * layers[-1].output_bytes + kept
    return static + depth * kept


def _spans(spans: Sequence[_C.PipelineSpan]) -> tuple[Span, ...]:
    return tuple(Span(one.rank, one.kind, one.microbatch, one.begin_seconds, one.end_seconds) for one in spans)
