"""What became of a script: on each form equal to its reference, refused, or wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import forms
import numpy as np
from pool import DEADLINE_S, Pool
from script import Script, shrunk
from setups import LOCAL, LOOSE
from worker import Told

TOLERANCE = 1e-5
# Wrong outcomes; the others are "equal", "refused", "agrees" and "not run".
WRONG = ("differs", "ranks differ", "hang", "died", "one rank alone", "untyped error", "end", "now and then")


@dataclass(frozen=True)
class Comparison:
    kind: str
    detail: str = ""

    @property
    def wrong(self) -> bool:
        return self.kind in WRONG


@dataclass
class Case:
    script: Script
    reference: Comparison  # "ran", or why plain DDP itself does not
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, Comparison]:
        return {form: comparison for form, comparison in self.comparisons.items() if comparison.wrong}


def _apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest difference, and where it is."""
    worst, where = 0.0, ""
    for name in sorted({*one, *other}):
        if name not in one or name not in other or one[name].shape != other[name].shape:
            return float("inf"), f"{name}: {[v[name].shape if name in v else None for v in (one, other)]}"
        a, b = one[name], other[name]
        if a.size == 0:
            continue
        nans = np.isnan(a) | np.isnan(b)
        if (np.isnan(a) != np.isnan(b)).any():
            return float("nan"), name
        scale = np.maximum(1.0, np.abs(a))
        apart = float((np.abs(a - b)[~nans] / scale[~nans]).max(initial=0.0))
        if apart > worst:
            worst, where = apart, name
    return worst, where


def _failed(told: list[Told | None]) -> Comparison | None:
    """Why a form has no values to compare; None: it has."""
    if any(one is None for one in told):
        return Comparison("hang", f"no word from ranks {[k for k, one in enumerate(told) if one is None]}")
    ended = [one for one in told if one is not None]
    if any(one.error for one in ended):
        first = next(one for one in ended if one.error)
        text = f"{first.error}: {first.message}"
        if not all(one.error for one in ended):
            return Comparison("one rank alone", text)
        # Ranks that skip other steps refuse another one; who refuses first ends the group for the rest.
        refused = any(one.ours for one in ended) and all(one.ours or _ended_by_peer(one) for one in ended)
        return Comparison("refused" if refused else "untyped error", text)
    if any(one.closing for one in ended):
        return Comparison("end", next(one.closing for one in ended if one.closing))
    return None


def _ended_by_peer(told: Told) -> bool:
    return told.error == "DistBackendError"


def _among(told: list[Told | None]) -> Comparison | None:
    """How far apart the replicas are in the end; None: they are not."""
    final = [{name: t.same[name] for name in ("model", "critic") if name in t.same} for t in told if t is not None]
    among, where = _apart(final[0], final[1])
    return None if among <= TOLERANCE else Comparison("ranks differ", f"by {among:.2e} in {where}")


def _judge(script: Script, form: str, told: list[Told | None], reference: list[Told | None]) -> Comparison:
    if (failed := _failed(told)) is not None:
        return failed
    if (apart_ranks := _among(told)) is not None:
        return apart_ranks
    ended, expected = [t for t in told if t is not None], [t for t in reference if t is not None]
    if form in forms.AVERAGING and script.keeps() == LOOSE:
        return Comparison("agrees")
    for rank, (one, other) in enumerate(zip(ended, expected, strict=True)):
        apart, where = _apart(one.same, other.same)
        if not apart <= TOLERANCE:
            return Comparison("differs", f"by {apart:.2e} in same {where} on rank {rank}")
        if form not in forms.AVERAGING:
            apart, where = _apart(one.mine, other.mine)
            if not apart <= TOLERANCE:
                return Comparison("differs", f"by {apart:.2e} in mine {where} on rank {rank}")
    return Comparison("equal")


def judge(
    pool: Pool,
    script: Script,
    only: Iterable[str] = forms.FORMS,
    *,
    deadline_s: float = DEADLINE_S,
    fresh: bool = False,
) -> Case:
    """Runs a script on its references and the forms; what is wrong runs twice, unless ``fresh``."""
    source, double = script.source(), script.setup.dtype == "float64"

    def run(form: str) -> list[Told | None]:
        return pool.run(source, form, double=double, deadline_s=deadline_s)

    plain = run(forms.REFERENCE)
    if (failed := _failed(plain)) is not None:
        return Case(script, failed)
    if (apart := _among(plain)) is not None:
        return Case(script, apart)
    case = Case(script, Comparison("ran"))
    local: list[Told | None] | None = None
    for form in only:
        reference = plain
        if form in forms.AVERAGING and script.keeps() == LOCAL:
            if local is None:
                local = run(forms.LOCAL)
            if (failed := _failed(local)) is not None:
                case.comparisons[form] = Comparison("not run", f"the local reference: {failed}")
                continue
            reference = local
        comparison = _judge(script, form, run(form), reference)
        if comparison.wrong and not fresh:
            # Once more in new processes, for which no earlier case can be to blame.
            pool.retire()
            again = _judge(script, form, run(form), reference)
            comparison = again if again.wrong else Comparison("now and then", f"{comparison.kind}: {comparison.detail}")
        case.comparisons[form] = comparison
    return case


def smallest(pool: Pool, case: Case, form: str, deadline_s: float = 8.0) -> Script:
    """The smallest script found that ends in the same way on the form."""
    kind = case.comparisons[form].kind

    def still_fails(script: Script) -> bool:
        try:
            again = judge(pool, script, [form], deadline_s=deadline_s, fresh=True)
        except (KeyError, IndexError, ValueError):
            return False
        return again.comparisons.get(form, Comparison("")).kind == kind

    return shrunk(case.script, still_fails, trials=40 if kind == "hang" else 250)
