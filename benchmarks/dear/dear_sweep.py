"""Where does dear pay, and does it ever cost? Its speed over DDP by the rate of the links and the size of the model.

Four hosts (netlab.py), emulated compute of 30 ms forward and 60 ms backward, the layers of dear_network.py. Each
cell trains both contenders in turn at their defaults; dear may fall back to an all-reduce where that is faster. Where
communication is nothing the ratio should be 1, and nowhere less: the smallest one of the map is what is asked.

The time of a step in a cell is known beforehand to a factor (bounds.py), from 90 ms to 12 s, and each cell is given
repeats and windows to fit the budget. dear decides within 215 steps. Where these would take minutes there is one repeat
of few steps, of dear with the buckets that it begins with and without its fallback: trying that would take all of them.
Cells that the budget does not reach are left out, and said to be.

    python benchmarks/dear/dear_sweep.py                         # 25 minutes at most
    python benchmarks/dear/dear_sweep.py --rates 1gbit,none --sizes 10,40
    python benchmarks/dear/dear_sweep.py --rates none --sizes 100 --update  # one cell anew, into the map that is there
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab, parse_rate
from lab.report import bounds
from lab.report.plot import draw_map
from lab.report.results import Checks, Report, Spread, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.contenders import contender
from lab.workloads.stragglers import parse
from lab.workloads.training import run_window, summarize

FORWARD_MS, BACKWARD_MS = 30.0, 60.0
COMPUTE = {"layers": 20, "forward_ms": FORWARD_MS, "backward_ms": BACKWARD_MS, "growth": 15.0}
TARGET = 0.97
UNLIMITED_BITS = 10e9  # only to plan with: what memory and two cores let through was never above it
SLOWER_THAN_BOUND = 1.2  # DDP measured 1.15 to 1.3 times its bound
SESSION_S = 2.5  # a group's connections, the first steps, the comparison of the result
LAUNCH_S = 12.0
SLOW_STEP_S = 1.0  # from here on nothing is tuned
ONE_REPEAT_S = 0.5  # from here on tuning takes too long to do it twice
DECIDING_STEPS = 215  # at most
LONGEST_TUNING_S = 150.0
USUAL_SHARE = 0.3  # of the longest tuning: a search ends when it does not get better


@dataclass(frozen=True)
class Cell:
    """One rate and one size, and how it is measured.

    Attributes:
        megabytes: Of parameters.
        step_s: Expected, of DDP.
        repeats: Of each contender.
        check_steps: See ``run_window``.
        warmup_s: See ``run_window``.
        window_s: See ``run_window``.
        tuning_s: See ``run_window``.
    """

    megabytes: float
    step_s: float
    repeats: int
    check_steps: int
    warmup_s: float
    window_s: float
    tuning_s: float

    def seconds(self, contenders: int) -> float:
        """Returns how long the cell takes, all repeats of all contenders; one of these tunes itself."""
        # A run in lockstep ends with the second step after the window.
        session = SESSION_S + (self.check_steps + 2) * self.step_s + self.warmup_s + self.window_s
        return self.repeats * (contenders * session + USUAL_SHARE * self.tuning_s)


def plan(megabytes: float, bits: float, hosts: int, *, repeats: int, scale: float = 1.0) -> Cell:
    """Returns how to measure a cell: ``scale`` shortens what is not needed for a result at all."""
    half_ms = bounds.reduce_scatter_ms(hosts, megabytes * 1e6, bits)
    step_s = SLOWER_THAN_BOUND * bounds.ddp_step_ms(FORWARD_MS, BACKWARD_MS, half_ms) / 1e3
    if step_s > SLOW_STEP_S:
        return Cell(megabytes, step_s, 1, 2, step_s, max(2.5 * step_s, 8.0 * scale), 0.0)
    repeats = repeats if step_s < ONE_REPEAT_S else 1
    # Ends when dear has decided. On fast links a step takes two or three times what its bytes would.
    tuning_s = min(3 * DECIDING_STEPS * step_s, LONGEST_TUNING_S)
    # Fast links with large models keep both cores busy, and single steps differ by a tenth: eight or more.
    return Cell(megabytes, step_s, repeats, 4, 1.0 * scale, max(8 * step_s, 5.0 * scale), tuning_s)


def ranks(rank: Rank) -> list[dict[str, Any]]:
    """Rank function: all cells of one rate. ``rank.settings``: ``contenders``, ``cells``, ``until`` (monotonic)."""
    found = []
    for cell in rank.settings["cells"]:
        # All ranks are on one machine, with one clock, but one of them must say what it read.
        if rank.rank == 0:
            rank.board.stop_step = 0 if time.monotonic() < rank.settings["until"] else 1
        rank.board.barrier()
        over = rank.board.stop_step != 0
        rank.board.barrier()
        if over:
            break
        checks = Checks()
        workload = {**COMPUTE, "parameter_bytes": int(cell["megabytes"] * 1e6)}
        spans = {name: cell[name] for name in ("warmup_s", "window_s", "tuning_s", "check_steps")}
        tried = [contender(text) for text in rank.settings["contenders"]]
        if not cell["tuning_s"]:
            tried = [which.without_fallback() for which in tried]
        measures = {
            which.name: functools.partial(
                run_window,
                rank,
                which,
                workload=workload,
                stragglers=parse("none", rank.world_size),
                checks=checks,
                **spans,
            )
            for which in tried
        }
        runs = in_turn(measures, cell["repeats"])
        found.append({"checks": checks.done, "runs": runs})
    return found


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders="ddp,dear:sharded/auto", repeats=2)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        "--rates", default="100mbit,300mbit,1gbit,3gbit,none", help="of each host's link; none: no limit"
    )
    parser.add_argument("--sizes", default="1,10,40,100", help="MB of parameters")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no further cell is begun")
    parser.add_argument("--update", action="store_true", help="keep the other cells of the results that are there")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.minutes, parsed.rates, parsed.sizes = 1, 2.0, "1gbit,none", "1,10"
    return parsed


def plans(args: argparse.Namespace, contenders: int) -> dict[str, list[Cell]]:
    """Returns the cells of each rate, at the largest scale that fits the budget, or at the smallest."""
    rates = cli.names(args.rates)
    sizes = [float(size) for size in cli.names(args.sizes)]
    for scale in (1.0, 0.8, 0.6, 0.5, 0.4, 0.3):
        cells = {
            rate: [
                plan(
                    size,
                    UNLIMITED_BITS if rate == "none" else parse_rate(rate),
                    args.hosts,
                    repeats=args.repeats,
                    scale=scale,
                )
                for size in sizes
            ]
            for rate in rates
        }
        seconds = sum(LAUNCH_S + sum(cell.seconds(contenders) for cell in row) for row in cells.values())
        if seconds <= 0.9 * args.minutes * 60:
            break
    print(f"planned: {seconds / 60:.1f} of {args.minutes:g} minutes, at scale {scale:g}", flush=True)
    return cells


def main() -> None:
    """Sweeps and writes ``dear_sweep.json`` and the map ``dear_sweep.png``."""
    args = arguments()
    begin = time.monotonic()
    contenders = cli.names(args.contenders)
    names = [contender(text).name for text in contenders]
    cells = plans(args, len(contenders))
    report = Report(
        "dear_sweep",
        script=cli.script_line(),
        unit="iterations/s",
        reference="ddp",
        conditions={"hosts": args.hosts, **COMPUTE, "contenders": contenders, "minutes": args.minutes},
    )
    rows = {rate: "no limit" if rate == "none" else rate for rate in cells}
    columns = [f"{float(size):g} MB" for size in cli.names(args.sizes)]
    until = begin + args.minutes * 60
    for rate, row in cells.items():
        if time.monotonic() > until:
            break
        with NetLab(args.hosts, rate=None if rate == "none" else rate) as lab:
            settings = {"contenders": contenders, "cells": [asdict(cell) for cell in row], "until": until}
            # Generous: a cell that is slower than planned is a result, too. The budget is kept between cells.
            deadline_s = 180 + 4 * sum(cell.seconds(len(contenders)) for cell in row)
            results = launch("dear_sweep:ranks", ranks=args.hosts, settings=settings, deadline_s=deadline_s, lab=lab)
        for index, cell in enumerate(row[: len(results[0])]):
            of_cell = [result[index] for result in results]
            figures = {name: [1e3 / run["step_ms"] for run in of_cell[0]["runs"][name]] for name in names}
            case, checks = f"{rows[rate]}, {columns[index]}", of_cell[0]["checks"]
            report.add(case, figures, checks=checks, target=TARGET, notes={"plan": asdict(cell), **summarize(of_cell)})
    report.conditions["minutes_taken"] = (time.monotonic() - begin) / 60
    if args.update:
        report.keep(args.results / "dear_sweep.json")
    shown_rows, shown_columns = (
        sorted({case.name.split(", ")[part] for case in report.cases}, key=key)
        for part, key in ((0, rate_of), (1, size_of))
    )
    comparison(report, names, expected=len(shown_rows) * len(shown_columns))

    def picture(drawn: Report, path: Path) -> None:
        draw_map(drawn, path, rows=shown_rows, columns=shown_columns, challenger=names[-1])

    report.write(args.results, picture=picture)


def rate_of(row: str) -> float:
    """Returns bits a second of a row's name."""
    return float("inf") if row == "no limit" else parse_rate(row)


def size_of(column: str) -> float:
    """Returns the megabytes of a column's name."""
    return float(column.removesuffix(" MB"))


def comparison(report: Report, names: list[str], *, expected: int) -> None:
    """Prints, and adds to the conditions, the smallest ratio of the map and how much of the map there is."""
    ratios: dict[str, Spread] = {case.name: case.ratios[names[-1]] for case in report.cases if names[-1] in case.ratios}
    if not ratios:
        return
    worst = min(ratios, key=lambda case: ratios[case].median)
    met = len(ratios) == expected and ratios[worst].median >= TARGET
    report.conditions["verdict"] = {
        "smallest": ratios[worst].median,
        "at": worst,
        "cells": len(ratios),
        "of": expected,
        "target": TARGET,
        "met": met,
    }
    print(
        f"{names[-1]}: smallest of {len(ratios)} cells (of {expected}): {ratios[worst]} at {worst}, "
        f"asked {TARGET:g}: {'met' if met else 'MISSED'}; {report.conditions['minutes_taken']:.1f} minutes"
    )


if __name__ == "__main__":
    main()
