"""Results turn repeats into a committed file: checks before timings, spread, paired ratios, JSON.

A ratio is taken repeat by repeat: both contenders run in turn inside one session (A B A B ...), so that what disturbs
the machine for a minute disturbs both sides of a ratio, and its spread shows what is left.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lab.run.machine import describe_machine

_T = TypeVar("_T")

RESULTS_FOLDER = Path(__file__).resolve().parent.parent.parent / "results"


class UncheckedError(AssertionError):
    """A figure was about to be taken of something whose result nobody had compared, or whose result was wrong."""


@dataclass(frozen=True)
class Spread:
    """Repeats of one figure."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("results: a spread needs at least one value")

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    def as_json(self) -> dict[str, Any]:
        """Returns median, min, max and the values themselves."""
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "repeats": len(self.values),
            "values": list(self.values),
        }

    def __str__(self) -> str:
        return f"{self.median:.4g} [{min(self.values):.4g}, {max(self.values):.4g}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Returns the spread of ``numerators[i] / denominators[i]``: a ratio a repeat, not a ratio of medians."""
    if len(numerators) != len(denominators):
        raise ValueError(f"results: {len(numerators)} and {len(denominators)} repeats cannot be paired")
    return Spread(tuple(a / b for a, b in zip(numerators, denominators, strict=True)))


def in_turn(contenders: Mapping[str, Callable[[], _T]], repeats: int) -> dict[str, list[_T]]:
    """Calls the contenders A B A B ..., ``repeats`` times each, and returns what each call returned."""
    values: dict[str, list[_T]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, measure in contenders.items():
            values[name].append(measure())
    return values


class Checks:
    """Which results were compared with the right answer; lives where the timing is done."""

    def __init__(self) -> None:
        self.done: dict[str, dict[str, float]] = {}

    def confirm(self, name: str, error: float, tolerance: float) -> None:
        """Notes that ``name`` was compared; raises UncheckedError when it is off by more than ``tolerance``."""
        if not error <= tolerance:  # NaN is wrong, too
            raise UncheckedError(f"results: {name} is wrong: error {error:.3g}, allowed {tolerance:.3g}; not timed")
        self.done[name] = {"error": error, "tolerance": tolerance}

    def require(self, name: str) -> None:
        """Raises UncheckedError unless ``name`` was confirmed: call it in front of a timed region."""
        if name not in self.done:
            raise UncheckedError(f"results: {name} would be timed without a check of its result")


@dataclass
class Case:
    """One row of a result: what two or more contenders did under the same conditions.

    Attributes:
        name: The conditions.
        figures: Of each contender, in the report's unit.
        ratios: Of each challenger over the reference.
        target: That the ratio should reach, if one was set.
        notes: Further numbers, into the JSON.
        machine: Where and when it was measured, if not in the report's run.
    """

    name: str
    figures: dict[str, Spread]
    ratios: dict[str, Spread]
    target: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] | None = None


class Report:
    """Collects cases; prints them, writes ``NAME.json`` and draws ``NAME.png``.

    Args:
        name: Of the files.
        script: The command that takes the figures again.
        unit: Of the figures.
        reference: The contender that the others are compared with.
        higher_is_better: False for times. Ratios are speed: always better when higher.
        conditions: The settings of the run, into the JSON.
    """

    def __init__(
        self,
        name: str,
        *,
        script: str,
        unit: str,
        reference: str,
        higher_is_better: bool = True,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.script, self.unit, self.reference = name, script, unit, reference
        self.higher_is_better = higher_is_better
        self.conditions = dict(conditions or {})
        self.machine = describe_machine()
        self.cases: list[Case] = []

    def add(
        self,
        case: str,
        figures: Mapping[str, Sequence[float]],
        *,
        checks: Mapping[str, Mapping[str, float]],
        target: float | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Case:
        """Adds the repeats of every contender under one set of conditions.

        Args:
            case: Name of the conditions.
            figures: Repeats by contender, paired by position.
            checks: ``Checks.done`` of the ranks that timed: each contender must be in it.
            target: For the ratio over the reference.
            notes: Further numbers.

        Raises:
            UncheckedError: A contender's result was not compared before it was timed.
        """
        for contender in figures:
            found = checks.get(contender)
            if found is None or not found["error"] <= found["tolerance"]:
                raise UncheckedError(f"results: {self.name}, {case}: no check of {contender} before its timing")
        ratios = {}
        for contender, values in figures.items():
            if contender != self.reference and self.reference in figures:
                pair = (values, figures[self.reference])
                ratios[contender] = paired_ratio(*(pair if self.higher_is_better else pair[::-1]))
        row = Case(
            case,
            {contender: Spread(tuple(values)) for contender, values in figures.items()},
            ratios,
            target,
            {**(notes or {}), "checks": {contender: dict(checks[contender]) for contender in figures}},
        )
        self.cases.append(row)
        print(self._lines(row), flush=True)
        return row

    def keep(self, path: Path) -> None:
        """Takes over the cases of an earlier results file that this report has not measured anew, in their order."""
        measured = {case.name: case for case in self.cases}
        self.cases = []
        earlier = json.loads(path.read_text())
        for old in earlier["cases"]:
            again = measured.pop(old["case"], None)
            if again is not None:
                self.cases.append(again)
                continue
            spreads = {
                key: {name: Spread(tuple(of["values"])) for name, of in old[key].items()}
                for key in ("figures", "ratios")
            }
            machine = old.get("machine", earlier["machine"])
            self.cases.append(Case(old["case"], **spreads, target=old["target"], notes=old["notes"], machine=machine))
        self.cases.extend(measured.values())

    def _lines(self, case: Case) -> str:
        lines = []
        for contender, spread in case.figures.items():
            line = f"{case.name:<24} {contender:<22} {spread!s:<30} {self.unit}"
            ratio = case.ratios.get(contender)
            if ratio is not None:
                aim = "" if case.target is None else f" (target {case.target:g})"
                line += f"   x {ratio}{aim}"
            lines.append(line)
        return "\n".join(lines)

    def table(self) -> str:
        """Returns all cases: median [min, max] of the figures, and of the ratios over the reference."""
        head = f"{self.name}: median [min, max], paired ratio over {self.reference} (above 1 is better)"
        return "\n".join([head, *(self._lines(case) for case in self.cases)])

    def as_json(self) -> dict[str, Any]:
        """Returns everything: script, conditions, machine, cases."""
        return {
            "name": self.name,
            "script": self.script,
            "unit": self.unit,
            "reference": self.reference,
            "higher_is_better": self.higher_is_better,
            "conditions": self.conditions,
            "machine": self.machine,
            "cases": [
                {
                    "case": case.name,
                    "figures": {name: spread.as_json() for name, spread in case.figures.items()},
                    "ratios": {name: spread.as_json() for name, spread in case.ratios.items()},
                    "target": case.target,
                    "notes": case.notes,
                    **({} if case.machine is None else {"machine": case.machine}),
                }
                for case in self.cases
            ],
        }

    def write(
        self,
        folder: Path = RESULTS_FOLDER,
        *,
        log_scale: bool = False,
        picture: Callable[[Report, Path], None] | None = None,
    ) -> Path:
        """Prints the table, writes JSON and PNG into ``folder`` and returns the path of the JSON.

        Args:
            folder: Made if it is missing.
            log_scale: Of the bars.
            picture: Draws the PNG, where bars do not show what was asked.
        """
        from lab.report.plot import draw

        print(self.table(), flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        if picture is None:
            draw(self, path.with_suffix(".png"), log_scale=log_scale)
        else:
            picture(self, path.with_suffix(".png"))
        print(f"written: {path} and {path.with_suffix('.png').name}", flush=True)
        return path
