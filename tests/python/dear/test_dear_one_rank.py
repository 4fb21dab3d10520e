"""Training by "dear" on one rank alone is training without it: what tests/distributed/dear does on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_dear_checkpointing
import test_dear_clipping
import test_dear_deferred
import test_dear_exact
import test_dear_features
import test_dear_known_faults
import test_dear_looking
import test_dear_loops
import test_dear_state
import test_dear_step_hooks
import test_dear_steps
import test_dear_two_passes
import test_dear_zeroing
from harness import Rank
from sharded import DTYPES, EXACT, FORMS, WAYS, check_within, each_in_ways
from test_dear_buffers import body_all
from test_dear_parts import body_in_parts, check_parts
from test_dear_planner import body_forward_alone, body_one_looks

BODIES: list[Callable[..., Any]] = [
    *test_dear_checkpointing.BODIES,
    *test_dear_features.BODIES,
    *test_dear_looking.BODIES,
    *test_dear_loops.BODIES,
    *test_dear_step_hooks.BODIES,
    *test_dear_steps.BODIES,
    *test_dear_two_passes.BODIES,
    *test_dear_zeroing.BODIES,
    *(test_dear_clipping.body_by_scripts, test_dear_clipping.body_changed),
    *(test_dear_exact.body_segments, test_dear_state.body_going_back),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: f"{body.__module__}.{body.__name__}")
def test_in_both_forms(alone: Rank, body: Callable[..., Any]) -> None:
    worst = each_in_ways(alone, [body])
    check_within(worst)


REPLICATED = [*test_dear_deferred.BODIES, test_dear_two_passes.body_branches, body_one_looks]


@pytest.mark.parametrize("body", REPLICATED, ids=lambda body: body.__name__)
def test_in_the_replicated_form(alone: Rank, body: Callable[..., Any]) -> None:
    worst = each_in_ways(alone, [body], ["replicated"])
    check_within(worst)


@pytest.mark.parametrize("body", [test_dear_exact.body_models, test_dear_exact.body_ddp_options])
def test_models_optimizers_and_options(alone: Rank, body: Callable[..., Any]) -> None:
    worst = each_in_ways(alone, [body], [FORMS[0], WAYS[-1]])
    check_within(worst)


def test_optimizers(alone: Rank) -> None:
    test_dear_exact.check_optimizers(each_in_ways(alone, [test_dear_exact.body_all_optimizers]))


def test_optimizers_that_need_whole_gradients(alone: Rank) -> None:
    found = each_in_ways(alone, [test_dear_exact.body_whole_gradients], ["replicated"])
    test_dear_exact.check_whole_gradients(found)


def test_bfloat16(alone: Rank) -> None:
    test_dear_exact.check_beside_ddp(test_dear_exact.body_bfloat16(alone, 0))


def test_clipping_keeps_the_precision_of_doubles(alone: Rank) -> None:
    worst = each_in_ways(alone, [test_dear_clipping.body_clipped_doubles])
    check_within(worst, 1e-12)


def test_buffers(alone: Rank) -> None:
    body_all(alone)


def test_parts(alone: Rank) -> None:
    check_parts(body_in_parts(alone))


def test_a_forward_pass_alone(alone: Rank) -> None:
    for name, (_, worst) in each_in_ways(alone, [body_forward_alone]).items():
        assert worst < EXACT, name


def test_a_new_job(alone: Rank, tmp_path: Path) -> None:
    worst = each_in_ways(alone, [test_dear_state.body_restart], FORMS, str(tmp_path))
    check_within(worst)


# In 16 bits several ranks train in tests/distributed.
TYPES = [pytest.param(dtype, marks=() if dtype == "float32" else pytest.mark.slow) for dtype in DTYPES]


@pytest.mark.parametrize("dtype", TYPES)
def test_known_faults(alone: Rank, dtype: str) -> None:
    test_dear_known_faults.check_known_faults(test_dear_known_faults.body_known_faults(alone, dtype), dtype)


BESIDE_A_FAULT = [
    (test_dear_exact.body_plans, test_dear_known_faults.late),
    (test_dear_looking.body_looking, test_dear_known_faults.late),
    (test_dear_state.body_full, test_dear_state.late_and_not_loaded),
]


@pytest.mark.parametrize(("body", "fault"), BESIDE_A_FAULT)
@pytest.mark.parametrize("dtype", TYPES)
def test_beside_a_fault(alone: Rank, dtype: str, body: Callable[..., Any], fault: Callable[..., Any]) -> None:
    found = test_dear_known_faults.in_forms_and_at_fault(alone, dtype, body, fault)
    test_dear_known_faults.check_beside_a_fault(found, dtype)
