"""A timeline turns a profiler's trace into a picture: which communication lies under which compute.

A trace is the dictionary that ``torch.profiler`` exports; spans are ``(begin, end)`` in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Span = tuple[float, float]

# Lanes from top to bottom: the beginnings of the ranges' names, and a colour.
LANES: dict[str, tuple[tuple[str, ...], str]] = {
    "forward": (("forward ",), "tab:blue"),
    "backward": (("backward ",), "tab:orange"),
    "reduce-scatter": (("torchext::dear::reduce_scatter",), "tab:green"),
    "all-gather": (("torchext::dear::all_gather",), "tab:purple"),
    "all-reduce": (("gloo:all_reduce", "torchext::dear::all_reduce"), "tab:red"),
    "waiting": (("torchext::dear::wait",), "tab:grey"),
}
_STEP = "step "
_KEPT = (*(prefix for prefixes, _ in LANES.values() for prefix in prefixes), _STEP, "Optimizer.step")


def trim(trace: Mapping[str, Any], first: int, last: int) -> list[dict[str, Any]]:
    """Returns what a picture needs of a trace: ranges of the lanes, of the steps and of the optimizer.

    Args:
        trace: Of steps in ranges called ``step 0``, ``step 1`` and so on.
        first: The first step to keep; times are from its beginning on, in microseconds, as traces have them.
        last: The last one.
    """
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X" and one["name"].startswith(_KEPT)]
    steps = {one["name"]: one for one in events if one["name"].startswith(_STEP)}
    begin = steps[f"{_STEP}{first}"]["ts"]
    end = steps[f"{_STEP}{last}"]["ts"] + steps[f"{_STEP}{last}"]["dur"]
    return [
        {
            "ph": "X",
            "name": one["name"],
            "pid": 0,
            "tid": one["tid"],
            "ts": round(one["ts"] - begin, 1),
            "dur": round(one["dur"], 1),
        }
        for one in events
        if one["ts"] < end and one["ts"] + one["dur"] > begin
    ]


def spans(events: Sequence[Mapping[str, Any]], prefixes: tuple[str, ...]) -> list[Span]:
    """Returns the union of the ranges whose names begin so, ascending and disjoint."""
    found = sorted(
        (one["ts"] / 1e3, (one["ts"] + one["dur"]) / 1e3) for one in events if one["name"].startswith(prefixes)
    )
    united: list[Span] = []
    for begin, end in found:
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((begin, end))
    return united


def length(ones: Sequence[Span]) -> float:
    """Returns how long spans are together."""
    return sum(end - begin for begin, end in ones)


def common(ones: Sequence[Span], others: Sequence[Span]) -> float:
    """Returns for how long two unions of spans lie under each other."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ones for b in others)


def overlap(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns milliseconds of each lane, and what share of each communication lies under forward and backward."""
    lanes = {name: spans(events, prefixes) for name, (prefixes, _) in LANES.items()}
    found = {f"{name} ms": length(ones) for name, ones in lanes.items() if ones}
    for name in ("reduce-scatter", "all-gather", "all-reduce"):
        if lanes[name]:
            for compute in ("forward", "backward"):
                share = common(lanes[name], lanes[compute]) / length(lanes[name])
                found[f"share of {name} under {compute}"] = share
    return found


def draw(traces: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, *, title: str) -> None:
    """Writes one PNG: a panel a trace, one lane below the other, on one axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 0.8 + 1.7 * len(traces)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, events) in zip(panels, traces.items(), strict=True):
        shown = [lane for lane, (prefixes, _) in LANES.items() if spans(events, prefixes)]
        for row, lane in enumerate(shown):
            prefixes, colour = LANES[lane]
            ranges = [(e["ts"] / 1e3, e["dur"] / 1e3) for e in events if e["name"].startswith(prefixes)]
            axes.broken_barh(ranges, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
        for one in events:
            if one["name"].startswith(_STEP):
                axes.axvline(one["ts"] / 1e3, color="black", linewidth=0.8)
        axes.set_yticks(range(len(shown)), shown)
        axes.invert_yaxis()
        axes.set_title(name, fontsize="medium", loc="left")
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("ms; black lines: a step begins")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=110)
