"""A worker comes to a job that is running: ``torchext.join_running_job``."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere
from case_choice import slow_on
from elastic_training import ElasticTraining
from harness import Rank, launch

pytestmark = pytest.mark.sanitize

BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {"order": "atc", "group_size": 3}),
    ("prague", {"generator": "static"}),
    ("dssync", {}),
    ("hop", {"backup_workers": 1, "max_iteration_gap": 4}),
    ("hop", {"weights": [[0.6, 0.4, 0], [0, 0.6, 0.4], [0.4, 0, 0.6]]}),
]


def body_joins(rank: Rank, backend: str, options: dict[str, Any], workers: int) -> Any:
    if rank.rank >= workers:
        rank.pause()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "3"  # its own torchrun has had to start it again
    training = ElasticTraining(rank, backend, options, workers=workers)
    if rank.rank < workers:
        training.train(8)
        rank.report("trains")
    training.grow_to(rank.size)
    # The newcomer is as far as the others, and has what they have.
    equal_everywhere(training.ddp.module)
    momentum = [state["momentum_buffer"].norm().item() for state in training.optimizer.state.values()]
    steps = training.sync.state_dict()["steps"]
    before = after = training.sync.stats()
    fewest = torch.zeros(1)
    while fewest < 4:  # on a busy machine a worker that comes early finds nobody to average with
        training.train(20)
        training.sync.synchronize()
        after = training.sync.stats()
        fewest.fill_(after["averages"] - before["averages"])
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
    with training.sync.averaged() as module:
        equal_everywhere(module)
    place = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    training.sync.detach()
    return steps, place, momentum, after


# tests/python/elastic has the options that fit one more worker.
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        *(BACKENDS[at] for at in (0, 2, 4)),
        *(pytest.param(*BACKENDS[at], marks=pytest.mark.slow) for at in (1, 3)),
    ],
    ids=str,
)
def test_a_newcomer_trains_with_the_others(backend: str, options: dict[str, Any]) -> None:
    with launch(body_joins, 4, backend, options, 3) as ranks:
        ranks.expect("trains", [0, 1, 2])
        ranks.proceed([3])
        values = ranks.values()
    steps, places, momenta, stats = zip(*values, strict=True)
    assert len(set(steps)) == 1 and steps[0] >= 8
    assert list(places) == [(rank, 4, backend) for rank in range(4)]
    assert momenta[3] == momenta[0] != momenta[1]
    for each in stats:
        assert (each["workers"], each["lost_ranks"], each["joined_ranks"]) == (4, [], [3])


def test_workers_come_to_one_that_is_alone() -> None:
    with launch(body_joins, 3, "prague", {}, 1) as ranks:
        ranks.expect("trains", [0])
        ranks.proceed([1, 2])
        values = ranks.values()
    assert [place[:2] for _, place, _, _ in values] in ([(0, 3), (1, 3), (2, 3)], [(0, 3), (2, 3), (1, 3)])
    assert all(stats["joined_ranks"] == [1, 2] for *_, stats in values)


def body_replaced(rank: Rank, backend: str) -> Any:
    """Rank 0 dies, and rank 3 comes in its place."""
    if rank.rank == 3:
        rank.pause()
    training = ElasticTraining(rank, backend, {}, workers=3)
    if rank.rank < 3:
        training.train(5)
        rank.report("trains")
        while training.workers() == 3:
            training.train(1)
        rank.report("two left")
        training.grow_to(3)
    training.train(10)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return dist.get_rank(), stats["workers"], stats["lost_ranks"], stats["joined_ranks"]


# The others' classes are those of the newcomers above.
@pytest.mark.parametrize("backend", slow_on(["prague", "dssync", "hop"], "dssync", "prague"))
def test_a_newcomer_takes_the_place_of_the_dead(backend: str) -> None:
    with launch(body_replaced, 4, backend) as ranks:
        ranks.expect("trains", [0, 1, 2])
        ranks.kill(0)
        ranks.expect("two left", [1, 2])
        ranks.proceed([3])
        assert ranks.values() == [(place, 3, [0], [3]) for place in range(3)]
