"""Two hundred random training scripts: each is plain DDP on every backend, or is refused on all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from comparisons import judge
from forms import CHOOSING
from generator import random_script
from pool import Pool, open_pool
from script import Script
from setups import EXACT

SCRIPTS = 200
CHUNK = 10
CHOOSING_SCRIPTS = 24


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with open_pool() as opened:
        yield opened


@pytest.mark.parametrize("first", range(0, SCRIPTS, CHUNK))
def test_no_silent_difference(pool: Pool, first: int) -> None:
    wrong = []
    for seed in range(first, first + CHUNK):
        case = judge(pool, random_script(seed))
        assert case.reference.kind == "ran", f"seed {seed}: plain DDP itself: {case.reference}"
        wrong += [
            f"seed {seed} on {form}: {comparison.kind} {comparison.detail}" for form, comparison in case.wrong.items()
        ]
    assert not wrong, "\n".join([*wrong, "shrink one: python tests/everyday/fuzz.py SEED --forms FORM"])


def test_no_silent_difference_where_dear_takes_over(pool: Pool) -> None:
    judged = [judge(pool, random_script(seed), [CHOOSING]).comparisons[CHOOSING] for seed in range(CHOOSING_SCRIPTS)]
    wrong = [f"seed {seed}: {found.kind} {found.detail}" for seed, found in enumerate(judged) if found.wrong]
    assert not wrong, "\n".join([*wrong, f"shrink one: python tests/everyday/fuzz.py SEED --forms {CHOOSING}"])


def test_a_seed_is_a_script() -> None:
    assert random_script(7) == random_script(7)
    assert random_script(7).source() != random_script(8).source()


def test_every_script_is_python() -> None:
    for seed in range(200):
        script = random_script(seed)
        compile(script.standalone(), f"seed {seed}", "exec")
        assert script.keeps() <= EXACT
        assert isinstance(script, Script)
