"""Draws a report: bars at the medians, whiskers from min to max, every repeat as a point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

if TYPE_CHECKING:
    from lab.report.results import Report, Spread

matplotlib.use("Agg")

_FILL = 0.8


def _bars(axes: Any, names: Sequence[str], series: dict[str, list[Spread | None]], colours: dict[str, str]) -> None:
    width = _FILL / max(1, len(series))
    for index, (label, spreads) in enumerate(series.items()):
        present = [(x + (index - (len(series) - 1) / 2) * width, spread) for x, spread in enumerate(spreads) if spread]
        if not present:
            continue
        places = [x for x, _ in present]
        medians = [spread.median for _, spread in present]
        below = [spread.median - min(spread.values) for _, spread in present]
        above = [max(spread.values) - spread.median for _, spread in present]
        colour = colours[label]
        axes.bar(places, medians, width * 0.9, yerr=[below, above], capsize=3, label=label, alpha=0.6, color=colour)
        for x, spread in present:
            axes.plot([x] * len(spread.values), spread.values, ".", color=colour, markersize=4)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.grid(axis="y", alpha=0.3)


def title(report: Report) -> str:
    """Returns what stands above every picture: name, repeats, machine and the command."""
    repeats = max((len(spread.values) for case in report.cases for spread in case.figures.values()), default=0)
    load = report.machine["load_average"][0]
    return (
        f"{report.name}: {repeats} repeats, min to max; {report.machine['cpu']}, {report.machine['cores']} cores, "
        f"torch {report.machine['torch']}, load {load:.1f} at the start\n{report.script}"
    )


def draw(report: Report, path: Path, *, log_scale: bool = False, extra: Callable[[Any], None] | None = None) -> None:
    """Writes one PNG: the figures on the left, the ratios and their targets on the right, and what ``extra`` draws."""
    from matplotlib.figure import Figure

    names = [case.name for case in report.cases]
    contenders = list(dict.fromkeys(name for case in report.cases for name in case.figures))
    challengers = list(dict.fromkeys(name for case in report.cases for name in case.ratios))
    bar_panels = 2 if challengers else 1
    more = 0 if extra is None else 1
    figure = Figure(figsize=(5 + 1.1 * len(names) * bar_panels + 4 * more, 4.5), layout="constrained")
    colours = {name: f"C{index}" for index, name in enumerate(contenders)}
    panels = figure.subplots(1, bar_panels + more, squeeze=False)[0]
    _bars(panels[0], names, {name: [case.figures.get(name) for case in report.cases] for name in contenders}, colours)
    panels[0].set_ylabel(f"{report.unit} ({'higher' if report.higher_is_better else 'lower'} is better)")
    if log_scale:
        panels[0].set_yscale("log")
    if challengers:
        _bars(
            panels[1], names, {name: [case.ratios.get(name) for case in report.cases] for name in challengers}, colours
        )
        panels[1].set_ylabel(f"ratio over {report.reference}, paired (above 1 is better)")
        panels[1].axhline(1, color="black", linewidth=0.8)
        for x, case in enumerate(report.cases):
            if case.target is not None:
                panels[1].hlines(case.target, x - 0.45, x + 0.45, colors="red", linestyles="dashed")
    if extra is not None:
        extra(panels[-1])
    # Below the bars, not over them; colours are the same in both panels.
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(title(report), fontsize="small")
    figure.savefig(path, dpi=110)


def draw_map(report: Report, path: Path, *, rows: Sequence[str], columns: Sequence[str], challenger: str) -> None:
    """Writes one PNG: the median ratio of ``challenger`` over the reference, by the two parts of a case's name.

    Args:
        report: Cases are named ``"ROW, COLUMN"``; one that is missing stays blank.
        path: Of the PNG.
        rows: From top to bottom.
        columns: From left to right.
        challenger: Whose ratios.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    ratios = {case.name: case.ratios[challenger] for case in report.cases if challenger in case.ratios}
    table = [[ratios.get(f"{row}, {column}") for column in columns] for row in rows]
    medians = [[float("nan") if cell is None else cell.median for cell in row] for row in table]
    figure = Figure(figsize=(3 + 1.5 * len(columns), 2.2 + 0.7 * len(rows)), layout="constrained")
    axes = figure.subplots()
    # White is "as fast as the reference", so that red cells are the ones to ask about.
    shown = axes.imshow(medians, cmap="RdBu", norm=TwoSlopeNorm(1.0, vmin=0.5, vmax=1.75), aspect="auto")
    for y, row in enumerate(table):
        for x, cell in enumerate(row):
            text = "-" if cell is None else f"{cell.median:.2f}\n{min(cell.values):.2f} to {max(cell.values):.2f}"
            axes.text(x, y, text, ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(shown, ax=axes, label=f"speed of {challenger} over {report.reference}")
    figure.suptitle(title(report), fontsize="x-small", wrap=True)
    figure.savefig(path, dpi=110)
