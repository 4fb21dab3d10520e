"""Draws link tables and predicted steps. Needs matplotlib, which torchext itself does not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torchext import _C
from torchext.auto.candidates import Candidate, core_of, search_profile
from torchext.auto.explanation import described
from torchext.auto.link_model import LinkModel, search_tables, shown_bytes
from torchext.auto.step_profile import Profile

__all__ = ["draw_link", "draw_timeline", "figure_with_rows"]

_COMPUTE = {"forward": "#9ecae1", "backward": "#4292c6", "unpack": "#bdbdbd", "optimizer": "#bdbdbd"}
_LINK = {"reduce": "#fdae6b", "gather": "#a1d99b"}
_EXPOSED = "#de2d26"


def figure_with_rows(rows: int, height: float) -> tuple[Any, Any]:
    """A figure, and its rows of axes with one x.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("pictures need matplotlib, which is not installed: pip install matplotlib") from None
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def draw_link(path: str | os.PathLike[str], link: LinkModel) -> None:
    """Draws the tables of a link model: measured points, table, and the straight line, log-log.

    Args:
        path: Of the picture; its ending says the format.
        link: What was measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, (axes,) = figure_with_rows(1, 5.0)
    for number, (name, table) in enumerate(link.tables.items()):
        color = f"C{number}"
        sizes = [nbytes for nbytes, _ in table.points]
        axes.plot(sizes, [1e3 * seconds for _, seconds in table.points], "o", color=color)
        axes.plot(sizes, [1e3 * table.seconds(nbytes) for nbytes in sizes], color=color, label=name)
        alpha, beta = table.line
        axes.plot(sizes, [1e3 * (alpha + beta * nbytes) for nbytes in sizes], ":", color=color)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms")
    axes.set_title(
        f"{link.world_size} ranks, {link.backend}: points as measured, lines as predicted with, dotted a straight line",
        fontsize=9,
    )
    axes.legend()
    figure.savefig(path)


def draw_timeline(
    path: str | os.PathLike[str], profile: Profile, link: LinkModel, candidates: Sequence[Candidate]
) -> None:
    """Draws a predicted step of each candidate: compute above, the link below, what compute waits for in red.

    Args:
        path: Of the picture; its ending says the format.
        profile: Of the model.
        link: Of the network.
        candidates: Exact ones.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, rows = figure_with_rows(len(candidates), 1.2 + 1.4 * len(candidates))
    for axes, candidate in zip(rows, candidates, strict=True):
        step = _C.simulate_candidate(search_profile(profile, link), search_tables(link), core_of(profile, candidate))
        busy = []
        for span in step.timeline:
            begin, length = 1e3 * span.begin_seconds, 1e3 * (span.end_seconds - span.begin_seconds)
            if span.activity in _COMPUTE:
                axes.broken_barh([(begin, length)], (1.1, 0.8), facecolors=_COMPUTE[span.activity])
                busy.append((begin, begin + length))
            else:
                axes.broken_barh([(begin, length)], (0.1, 0.8), facecolors=_LINK[span.activity], edgecolors="white")
        end = 0.0
        for begin, finish in [*sorted(busy), (1e3 * step.step_seconds, 1e3 * step.step_seconds)]:
            if begin > end:
                axes.broken_barh([(end, begin - end)], (1.1, 0.8), facecolors=_EXPOSED)
            end = max(end, finish)
        axes.set(yticks=[0.5, 1.5], yticklabels=["link", "compute"], ylim=(0, 2))
        axes.set_title(f"{described(profile, candidate)}: {1e3 * step.step_seconds:.0f} ms", loc="left", fontsize=9)
    rows[-1].set_xlabel(f"ms; {shown_bytes(profile.gradient_bytes)} of gradients; red: compute waits")
    figure.savefig(path)
