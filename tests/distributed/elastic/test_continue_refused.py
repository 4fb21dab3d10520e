"""Where training does not go on in spite of ``on_peer_failure="continue"``."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere
from elastic_training import ElasticTraining
from harness import Rank, elapsed_error, launch, run_ranks

import torchext

pytestmark = pytest.mark.sanitize


def body_stopped(rank: Rank) -> Any:
    training = ElasticTraining(rank, "prague", {"heartbeat_timeout": timedelta(seconds=1.5)})
    training.train(5)
    rank.report("ready")
    error = ""
    try:
        while training.workers() > 3:
            training.train(1)
        training.train(10)
        training.sync.synchronize()
        equal_everywhere(training.ddp.module)
        rank.report("went on")
    except dist.DistBackendError as caught:
        error = str(caught)
    return error, training.sync.stats()["lost_ranks"]


def test_who_was_stopped_for_too_long_is_told_so() -> None:
    with launch(body_stopped, 4) as ranks:
        ranks.expect("ready")
        ranks.kill(2, signal.SIGSTOP)
        ranks.expect("went on", ranks=[0, 1, 3], deadline=30)
        ranks.kill(2, signal.SIGCONT)
        outcomes = ranks.outcomes(deadline=30)
    assert [outcome.ok for outcome in outcomes] == [True] * 4, outcomes
    assert [outcome.value for outcome in outcomes if outcome.rank != 2] == [("", [2])] * 3
    assert "the others train on without rank 2" in outcomes[2].value[0], outcomes[2]


def body_left_out(rank: Rank) -> int:
    """As torch does for those that a new group leaves out, where the default group has a device."""
    rank.init("prague")
    world = dist.group.WORLD
    assert world is not None
    torchext.backend_of(world).perform_nocolor_split(torch.device("cpu"))
    group = dist.new_group([0])
    return -1 if rank.rank else dist.get_world_size(group)


def test_those_that_a_group_leaves_out() -> None:
    assert run_ranks(body_left_out, 2) == [1, -1]


def body_all_alive(rank: Rank) -> tuple[str, str, float]:
    training = ElasticTraining(rank, "prague", {})
    rank.report("attached")
    if rank.rank == 1:
        rank.pause()  # until all are: attaching would raise, too
        torchext.backend_of().abort_with_reason("enough of this")
    error = elapsed_error(lambda: training.train(1_000_000))
    assert training.workers() == 3
    return error


def test_a_failure_without_a_death_is_raised() -> None:
    with launch(body_all_alive, 3) as ranks:
        ranks.expect("attached")
        start = time.monotonic()
        ranks.proceed([1])
        for kind, text, _ in ranks.values():
            assert kind == "DistBackendError" and "enough of this" in text, (kind, text)
        assert time.monotonic() - start < 10
