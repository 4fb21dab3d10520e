"""Says in words what a pipeline's plan is, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchext.auto.link_model import shown_bytes

if TYPE_CHECKING:
    from torchext.auto.pipeline.pipeline_plan import PipelinePlan

__all__ = ["explained"]

_FAR = 4  # times the largest message: times beyond it are guessed from the last two sizes
_ORDER = {"1f1b": "1F1B by warm-up depth", "gpipe": "GPipe", "zero-bubble": "zero bubble"}


def explained(plan: PipelinePlan) -> str:
    """What is planned, a line for each stage, and a line for each alternative."""
    placement, profile, link = plan.placement, plan.profile, plan.link
    widths = {stage.data * stage.tensor for stage in placement.stages}
    lines = [
        f"{placement.world_size} ranks: {len(placement.stages)} stage{'s' * (len(placement.stages) > 1)}, each on "
        f"{', '.join(map(str, sorted(widths)))} rank{'s' * (max(widths) > 1)}, {placement.microbatches} micro-batches "
        f"through each pipeline, {_ORDER[placement.order]}",
        f"predicted {_milliseconds(plan.seconds)} a step, of which ranks wait {100 * plan.bubble:.0f} %; links of "
        f"{link.bytes_per_second / 1e6:.4g} MB/s, {link.latency_seconds * 1e3:.2g} ms a message ({link.backend})",
        "all ways to cut the layers were tried" if plan.exhaustive else "not all ways to cut the layers were tried",
        "",
    ]
    rows = [("stage", "layers", "in flight", "forward", "backward", "memory", "buckets")]
    for number, stage in enumerate(placement.stages):
        layers = profile.layers[stage.first : stage.last + 1]
        forward = sum(layer.forward for layer in layers)
        backward = sum(layer.backward_input + layer.backward_weight for layer in layers)
        names = layers[0].name if stage.size == 1 else f"{layers[0].name} .. {layers[-1].name}"
        rows.append(
            (
                str(number),
                f"{stage.size}: {names}",
                f"{stage.depth}{', recomputed' * stage.recompute}",
                _milliseconds(forward),
                _milliseconds(backward),
                shown_bytes(plan.peak_bytes[number]),
                ", ".join(map(shown_bytes, stage.sync)) or "-",
            )
        )
    lines += _columns(rows)
    lines += _beyond(plan)
    if plan.alternatives:
        lines += ["", "tried:"]
        lines += _columns(
            [
                ("-" if other.seconds is None else _milliseconds(other.seconds), other.name, other.reason)
                for other in plan.alternatives
            ]
        )
    return "\n".join(lines)


def _beyond(plan: PipelinePlan) -> list[str]:
    """What to say where activations are far larger than any message that was measured."""
    sent = plan.link.tables.get("p2p")
    ends = [plan.profile.layers[stage.last].output_bytes for stage in plan.placement.stages[:-1]]
    if sent is None or not ends or max(ends) <= _FAR * sent.points[-1][0]:
        return []
    return [
        "",
        f"transfers of {shown_bytes(max(ends))}: no message above {shown_bytes(sent.points[-1][0])} was measured, so "
        "calibrate longer",
    ]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    width = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(f"{text:<{width[column]}}" for column, text in enumerate(row)).rstrip() for row in rows]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
