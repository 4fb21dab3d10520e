"""Draws predicted steps of pipelines. Needs matplotlib, which torchext itself does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchext.auto.plots import figure_with_rows

if TYPE_CHECKING:
    from torchext.auto.pipeline.pipeline_plan import PipelinePlan

__all__ = ["draw_frontier", "draw_pipelines"]

_COLORS = {"F": "#9ecae1", "B": "#4292c6", "I": "#4292c6", "W": "#a1d99b"}
_TRANSFER = "#fdae6b"
_WAITING = "#f0f0f0"


def draw_pipelines(path: str | os.PathLike[str], plans: Mapping[str, PipelinePlan]) -> None:
    """Draws a predicted step of each plan, one over the other: a line a rank, transfers in thin lines below it.

    Args:
        path: Of the picture; its ending says the format.
        plans: Title -> plan.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    ranks = max(len(plan.placement.stages) for plan in plans.values())
    figure, rows = figure_with_rows(len(plans), 0.8 + len(plans) * (0.6 + 0.35 * ranks))
    for axes, (title, plan) in zip(rows, plans.items(), strict=True):
        found = plan.predict()
        stages = len(plan.placement.stages)
        for rank in range(stages):
            base = stages - 1 - rank
            axes.broken_barh([(0, 1e3 * found.seconds)], (base + 0.2, 0.7), facecolors=_WAITING)
            for span in found.spans:
                if span.rank == rank and span.kind in _COLORS:
                    begin, length = 1e3 * span.begin, 1e3 * (span.end - span.begin)
                    axes.broken_barh(
                        [(begin, length)],
                        (base + 0.2, 0.7),
                        facecolors=_COLORS[span.kind],
                        edgecolors="white",
                        linewidth=0.3,
                    )
            for span in found.transfers:
                if span.rank == rank:
                    begin, length = 1e3 * span.begin, 1e3 * (span.end - span.begin)
                    place = base + (0.1 if span.kind == "SEND_F" else 0.02)
                    axes.broken_barh([(begin, length)], (place, 0.07), facecolors=_TRANSFER)
        axes.set(yticks=[stages - rank - 0.45 for rank in range(stages)], ylim=(0, stages))
        axes.set_yticklabels([f"{rank}: {size} layers" for rank, size in enumerate(plan.sizes)], fontsize=7)
        axes.set_title(
            f"{title}: {1e3 * found.seconds:.4g} ms, ranks wait {100 * found.bubble:.0f} %", loc="left", fontsize=9
        )
    rows[-1].set_xlabel("ms; blue: forward, dark: backward or its input part, green: weights, orange: transfers")
    figure.savefig(path)


def draw_frontier(path: str | os.PathLike[str], plan: PipelinePlan) -> None:
    """Draws what more memory buys: a step's time by the memory of the fullest rank.

    Args:
        path: Of the picture; its ending says the format.
        plan: With a frontier.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, (axes,) = figure_with_rows(1, 4.0)
    points = plan.frontier()
    axes.step([p.memory / 2**20 for p in points], [1e3 * p.seconds for p in points], where="post", color="#bdbdbd")
    for name in dict.fromkeys(p.schedule for p in points):
        own = [p for p in points if p.schedule == name]
        axes.plot([p.memory / 2**20 for p in own], [1e3 * p.seconds for p in own], "o", label=name)
    axes.set(xlabel="MiB of the fullest rank", ylabel="ms a step, predicted")
    axes.legend()
    figure.savefig(path)
