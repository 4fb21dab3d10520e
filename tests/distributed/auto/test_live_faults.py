"""A rank dies while the backend ``torchext`` measures, decides or trains: the others name it, and do not hang."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, launch
from made_plans import ROWS, Net
from test_live_choice import BEFORE, chosen, sgd
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import _C
from torchext.auto import live_choice

pytestmark = pytest.mark.sanitize

SIZE, VICTIM = 3, 1
DEATH_LIMIT = 10.0  # generous: a loaded machine's share comes on top
# What is under way -> the point, and how often it is passed there before.
PLACES = {
    "measuring links": ("call.started", 0),
    "measuring steps": ("call.started", 0),
    "deciding": ("call.agreed", 1),
    "training by dear": ("exchange.begun", 0),
}


def stages(place: str, at: Any) -> Iterator[str]:
    """What a script does, by what is under way; ``at`` is called in front of the place."""

    def before(stage: str) -> str:
        if stage == place:
            at()
        return stage

    gathered = live_choice.gathered

    def gather(*given: Any) -> Any:
        before("deciding")
        return gathered(*given)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(live_choice, "gathered", gather))
        if place != "measuring links":
            patches.enter_context(chosen("dear", "replicated"))
        model = Net()
        ddp, optimizer = DistributedDataParallel(model), sgd(model.parameters())
        yield before("measuring links")
        torchext.attach(ddp, optimizer)
        for step in range(BEFORE + 100):
            stage = "measuring steps" if step < BEFORE - 1 else "deciding" if step < BEFORE else "training by dear"
            # Early: what the dead rank has sent already lets the others come one step further.
            yield before(stage) if step in (BEFORE - 3, BEFORE) else stage
            optimizer.zero_grad()
            ddp(torch.ones(ROWS, 16)).pow(2).mean().backward()
            optimizer.step()


def body(rank: Rank, place: str) -> Any:
    options = torchext.DeAROptions(
        allreduce_fallback=False, heartbeat_timeout=timedelta(seconds=5), timeout=timedelta(seconds=60)
    )
    rank.init("torchext", timeout=60, pg_options=options)
    reached = ""

    def arm() -> None:
        if rank.rank == VICTIM:
            point, passes = PLACES[place]
            _C.arm_fault_point(point, "kill", passes)

    def train() -> None:
        nonlocal reached
        for stage in stages(place, arm):
            reached = stage

    first = elapsed_error(train)
    second = elapsed_error(lambda: dist.all_reduce(torch.ones(4)))
    return reached, first, second, torchext.backend_of().failure


# Steps are measured and trained by collectives of dear's, whose faults tests/distributed/fault has.
@pytest.mark.parametrize(
    "place",
    [
        *("measuring links", "deciding"),
        *(pytest.param(place, marks=pytest.mark.slow) for place in ("measuring steps", "training by dear")),
    ],
)
def test_a_rank_that_dies_is_named(place: str) -> None:
    with launch(body, SIZE, place) as ranks:
        start = time.monotonic()
        outcomes = ranks.outcomes([rank for rank in range(SIZE) if rank != VICTIM], deadline=30)
        assert time.monotonic() - start < DEATH_LIMIT
        for outcome in outcomes:
            assert outcome.ok, outcome.trace
            reached, *errors, failure = outcome.value
            assert reached == place
            for kind, text, _ in errors:
                assert kind == "DistBackendError", outcome.value
                assert f"rank {VICTIM} died" in text, outcome.value
            assert errors[1][2] < 3  # at once
            assert failure[0] == VICTIM
        (died,) = ranks.outcomes([VICTIM], deadline=5)
        assert died.error == "ProcessEnded"
        assert ranks.exit_code(VICTIM) == -signal.SIGKILL
