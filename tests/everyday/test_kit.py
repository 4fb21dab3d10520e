"""The kit itself: it sees what is wrong, says how, and finds the smallest script that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import comparisons
import forms
import pytest
from operation import Op
from pool import Pool, open_pool
from script import Phase, Script
from setups import Setup

ZERO, PASS, STEP = Op("zero"), Op("pass"), Op("step")


def script(*ops: Op, times: int = 3, setup: Setup | None = None) -> Script:
    return Script(0, setup or Setup(), (Phase(times, ops),))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with open_pool() as opened:
        yield opened


def test_plain_ddp_is_itself(pool: Pool) -> None:
    case = comparisons.judge(pool, script(ZERO, PASS, STEP), [forms.REFERENCE])
    assert case.comparisons == {forms.REFERENCE: comparisons.Comparison("equal")}


def test_averaged_parameters_are_plain_ddp_for_sgd_alone(pool: Pool) -> None:
    kinds = []
    for optimizer in ("SGD momentum", "Adam"):
        case = comparisons.judge(pool, script(ZERO, PASS, STEP, setup=Setup(optimizer=optimizer)), [forms.LOCAL])
        kinds.append(case.comparisons[forms.LOCAL].kind)
    assert kinds == ["equal", "differs"]


def test_an_error_on_one_rank_alone_is_seen(pool: Pool) -> None:
    told = pool.run("if rank == 1:\n    raise RuntimeError('torchext: no')\n", "gloo", double=True)
    comparison = comparisons._failed(told)
    assert comparison is not None
    assert comparison.kind == "one rank alone"
    assert "torchext: no" in comparison.detail


def test_a_hang_is_seen_and_the_next_script_runs(pool: Pool) -> None:
    told = pool.run("import time\ntime.sleep(60 * rank)\n", "gloo", double=True, deadline_s=2.0)
    comparison = comparisons._failed(told)
    assert comparison is not None
    assert (comparison.kind, comparison.detail) == ("hang", "no word from ranks [1]")
    case = comparisons.judge(pool, script(ZERO, PASS, STEP), [forms.REFERENCE])
    assert case.comparisons[forms.REFERENCE].kind == "equal"


def test_a_difference_shrinks_to_what_makes_it(pool: Pool) -> None:
    """Clipping on a form that keeps gradients local: a loop with much else shrinks to it."""
    long = Script(
        0,
        Setup(output="tuple", norm="layer", scheduler="step", ema="list"),
        (
            Phase(4, (ZERO, PASS, STEP, Op("schedule"))),
            Phase(3, (ZERO, Op("pass", (("loss", "two"),)), Op("grad norms"), Op("grad sign"), STEP, Op("update ema"))),
        ),
    )
    # On this form alone the reference is plain DDP, whatever a feature keeps.
    case = comparisons.judge(pool, long, [forms.LOCAL])
    assert case.comparisons[forms.LOCAL].kind == "differs"
    small = comparisons.smallest(pool, case, forms.LOCAL)
    assert small == script(PASS, Op("grad sign"), STEP, times=1)
