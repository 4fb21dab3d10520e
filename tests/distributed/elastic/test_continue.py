"""A worker dies, the others train on: ``attach(..., on_peer_failure="continue")``."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere
from case_choice import slow_on
from elastic_training import ElasticTraining
from harness import Rank, launch
from interpreters import run_script
from rows import row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize


def body_continue(rank: Rank, backend: str, options: dict[str, Any], sizes: list[int]) -> Any:
    said: list[str] = []
    logging.getLogger("torchext").addFilter(lambda record: not said.append(record.getMessage()))
    training = ElasticTraining(rank, backend, options)
    first = training.validation_loss()
    training.train(5)
    for size in sizes:
        rank.report(f"ready for {size}")
        # Not "until the worker notices it": the others notice it in other steps, and schedules count steps.
        training.meet_until(lambda stats, size=size: stats["workers"] == size, steps=10)  # type: ignore[misc]
        before = training.sync.stats()
        training.train(30)
        after = training.sync.stats()
        # It is no training on its own that goes on.
        assert size == 1 or after["averages"] - before["averages"] >= 5, (before, after)
        assert after["steps"] - before["steps"] == 30, (before, after)
        with training.sync.averaged() as module:
            equal_everywhere(module)
            assert dist.get_world_size() == size
    training.sync.detach()
    return first, training.validation_loss(), after, said


# tests/python/elastic has the options that fit those who are left; here are the ways to go on with them.
DEATHS: list[tuple[list[int], str, dict[str, Any]]] = [
    ([0, 2, 1], "prague", {"generator": "random"}),  # the host of the generator first, and until one is left
    ([1], "prague", {"generator": "static"}),
    ([0, 1], "dssync", {"schedule": "random", "order": "atc"}),
    ([2], "hop", {"staleness": 3, "max_iteration_gap": 4, "max_jump": 4}),
    ([3], "hop", {"weights": [[0.6, 0.4, 0, 0], [0, 0.6, 0.4, 0], [0, 0, 0.6, 0.4], [0.4, 0, 0, 0.6]]}),
]
MORE_DEATHS: list[tuple[list[int], str, dict[str, Any]]] = [
    ([2], "prague", {"order": "atc", "group_size": 4}),
    ([0], "prague", {}),
    ([3], "dssync", {}),
    ([2], "dssync", {"schedule": "topology", "racks": [0, 1, 0, 1]}),
    ([2], "hop", {}),
    ([0], "hop", {"order": "serial"}),
    ([1], "hop", {"backup_workers": 1, "max_iteration_gap": 4}),
]


@pytest.mark.parametrize(
    ("victims", "backend", "options", "workers"),
    [
        *((*death, 4) for death in DEATHS),
        *(pytest.param(*death, 4, marks=pytest.mark.slow) for death in MORE_DEATHS),
        pytest.param([5, 0], "prague", {}, 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_living_train_on(victims: list[int], backend: str, options: dict[str, Any], workers: int) -> None:
    sizes = [workers - 1 - lost for lost in range(len(victims))]
    with launch(body_continue, workers, backend, options, sizes) as ranks:
        for victim, size in zip(victims, sizes, strict=True):
            ranks.expect(f"ready for {size}", deadline=30)
            ranks.kill(victim)
        for outcome in ranks.outcomes(deadline=60):
            assert outcome.ok, outcome.trace
            first, last, stats, said = outcome.value
            assert last < 0.8 * first
            for victim, size, line in zip(victims, sizes, said, strict=True):
                says = rf"torchext: lost rank {victim} \(.+\); training goes on with {size} workers"
                assert re.match(says, line), said
            assert stats["lost_ranks"] == victims and stats["workers"] == sizes[-1]
            assert 0 < stats["recovery_ms"] < 10_000 * len(victims)


# Of dssync, too, the synchronizer is GroupSynchronizer.
BACKENDS = slow_on(["prague", "dssync", "hop"], "dssync")


def body_average(rank: Rank, backend: str, options: dict[str, Any]) -> Any:
    """The dead is missed in an exact average, which the others form without it."""
    training = ElasticTraining(rank, backend, options)
    training.train(3)
    # Else a worker that is a step behind may be put into a group with the victim, which does not come to it while it
    # pauses: nobody would be killed, since not everybody would be ready.
    training.sync.synchronize()
    rank.report("ready")
    if rank.rank == 1:
        rank.pause()
    with training.sync.averaged() as module:
        equal_everywhere(module)
    training.train(3)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    return training.workers()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_average_is_formed_without_the_dead(backend: str) -> None:
    with launch(body_average, 4, backend, {}) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        for outcome in ranks.outcomes(deadline=30):
            assert outcome.ok, outcome.trace
            assert outcome.value == 3


def body_counts(rank: Rank, options: dict[str, Any]) -> tuple[int, int]:
    """Workers that wait in a step's end, for tokens of one that is gone, make each step once."""
    training = ElasticTraining(rank, "hop", options)
    training.train(3)
    training.sync.synchronize()
    training.train(1)  # stale models are none where one has sent none
    rank.report("ready")
    if rank.rank == 1:
        rank.pause()
    while training.workers() == 3:
        training.train(1)
    return training.step, training.sync.iteration


@pytest.mark.parametrize("options", [{}, {"staleness": 5, "max_iteration_gap": 2}], ids=str)
def test_a_step_is_counted_once(options: dict[str, Any]) -> None:
    with launch(body_counts, 3, options) as ranks:
        ranks.expect("ready")
        time.sleep(3.0)  # they have gone as far as they may without it
        ranks.kill(1)
        values = []
        for outcome in ranks.outcomes(deadline=30):
            assert outcome.ok, outcome.trace
            values.append(outcome.value)
        # All go on from the iteration of the furthest.
        assert max(iteration for _, iteration in values) == max(steps for steps, _ in values)


def body_apart(rank: Rank, backend: str, options: dict[str, Any]) -> int:
    """Worker 0 is late when one dies: as far as the schedule lets them, the others are steps ahead of it."""
    training = ElasticTraining(rank, backend, options)
    training.train(4)
    training.sync.synchronize()
    rank.report("ready")
    for step in range(12):
        if step == 1 and rank.rank == 0:
            time.sleep(3.0)
        training.train(1)
    with training.sync.averaged() as module:
        equal_everywhere(module)
    training.train(3)
    training.sync.synchronize()
    return training.workers()


# Both have schedules, by which workers may be steps apart.
SCHEDULED: list[tuple[str, dict[str, Any]]] = [
    ("dssync", {}),
    ("dssync", {"order": "atc"}),
    ("prague", {"generator": "static"}),
]


@pytest.mark.parametrize(("backend", "options"), [SCHEDULED[0], *slow_on(SCHEDULED[1:], "dssync", "prague")], ids=str)
def test_workers_that_are_steps_apart_when_one_dies(backend: str, options: dict[str, Any]) -> None:
    with launch(body_apart, 8, backend, options) as ranks:  # with fewer they are one step apart at most
        ranks.expect("ready")
        time.sleep(1.5)
        ranks.kill(3)
        for outcome in ranks.outcomes(deadline=30):
            assert outcome.ok, outcome.trace
            assert outcome.value == 7


def body_notices(rank: Rank, backend: str, options: dict[str, Any]) -> int:
    """Workers decide to meet when they notice the loss, some steps apart."""
    training = ElasticTraining(rank, backend, options)
    training.train(4)
    rank.report("ready")
    while training.workers() == 8:
        training.train(1)
    with training.sync.averaged() as module:
        equal_everywhere(module)
    training.train(5)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    return training.workers()


@pytest.mark.parametrize(("backend", "options"), slow_on(SCHEDULED, "dssync"), ids=str)
def test_workers_may_meet_when_they_notice_a_loss(backend: str, options: dict[str, Any]) -> None:
    with launch(body_notices, 8, backend, options) as ranks:
        ranks.expect("ready")
        time.sleep(0.5)
        ranks.kill(3)
        for outcome in ranks.outcomes(deadline=30):
            assert outcome.ok, outcome.trace
            assert outcome.value == 7


ATTACHES = """
    import os, signal, sys, time
    import torch, torch.distributed as dist, torchext
    from torch.nn.parallel import DistributedDataParallel

    backend, how, path = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=3)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    sync = torchext.attach(ddp, optimizer, on_peer_failure="continue")
"""

SCRIPT = (
    ATTACHES
    + """
    steps = 0
    while sync.stats()["workers"] == 3 or steps < 50:
        if rank == 1 and steps == 20:
            if how == "raise":
                raise KeyError("no such sample")
            if how == "destroy":
                dist.destroy_process_group()
            sys.exit()
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        steps += 1
        if how in ("exit between meetings", "destroy"):
            sync.synchronize()
        time.sleep(0.005)
    sync.synchronize()
    print(sync.stats()["workers"], sync.stats()["lost_ranks"])
"""
)


# An exception and an exit end at the same handler. Between meetings others are in a collective already.
SCRIPT_ENDS = [("hop", "raise"), ("dssync", "exit between meetings"), ("prague", "destroy")]
MORE_SCRIPT_ENDS = [
    *(("prague", "raise"), ("dssync", "raise"), ("hop", "exit")),
    *(("prague", "exit between meetings"), ("hop", "exit between meetings")),
    *(("dssync", "destroy"), ("hop", "destroy")),
]


@pytest.mark.parametrize(
    ("backend", "how"), [*SCRIPT_ENDS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_SCRIPT_ENDS)]
)
def test_the_others_train_on_when_a_script_ends(tmp_path: Path, backend: str, how: str) -> None:
    ends = run_script(tmp_path, SCRIPT, 3, backend, how, str(tmp_path / "store"))
    assert [ended.code for ended in ends] == [0, int(how == "raise"), 0], ends
    for rank in (0, 2):
        assert ends[rank].out.strip() == "2 [1]", ends[rank]


LEAVES_AFTERWARDS = (
    ATTACHES
    + """

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    train(10)
    sync.synchronize()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while not torchext.backend_of().failure[1]:
        time.sleep(0.01)
    if rank == 1:  # it has trained all it wanted
        time.sleep(0.5)
        if how == "raise":
            dist.all_reduce(torch.ones(1))
        if how == "detach":
            sync.detach()
        sys.exit()
    time.sleep(5)  # a long step
    start = time.monotonic()
    train(20)
    sync.synchronize()
    print(sync.stats()["workers"], sync.stats()["lost_ranks"], time.monotonic() - start < 15)
"""
)


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        *(("dssync", "exit"), ("hop", "raise"), ("prague", "detach")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("prague", "exit"), ("hop", "exit"), ("prague", "raise"), ("hop", "detach"))
        ),
    ],
)
def test_who_leaves_after_a_death_is_not_waited_for(tmp_path: Path, backend: str, how: str) -> None:
    """It lived when the group failed, and said so."""
    ends = run_script(tmp_path, LEAVES_AFTERWARDS, 3, backend, how, str(tmp_path / "store"))
    assert [ended.code for ended in ends] == [-9, int(how == "raise"), 0], ends
    assert ends[2].out.strip() == "1 [0, 1] True", ends[2]


class Branches(nn.Module):
    """Uses one of two layers, whichever the step says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](inputs)


def body_unused(rank: Rank) -> Any:
    rank.init("prague")
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = torchext.attach(ddp, optimizer, on_peer_failure="continue")

    def train(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            ddp(torch.ones(2, 4), (step + rank.rank) % 2).square().mean().backward()
            optimizer.step()

    train(4)
    rank.report("ready")
    while sync.stats()["workers"] == 3:
        train(1)
    train(10)
    sync.synchronize()
    equal_everywhere(ddp.module)
    return sync.stats()["lost_ranks"]


def test_parameters_that_only_some_workers_use() -> None:
    with launch(body_unused, 3) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        assert ranks.values() == [[1], [1]]


class Pause(nn.Module):
    """Between two layers: waits there for the group to fail, when told so."""

    armed = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        while self.armed and not torchext.backend_of().failure[1]:
            time.sleep(0.01)
        self.armed = False
        return inputs


def body_in_forward(rank: Rank, backend: str) -> Any:
    rank.init(backend)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    pause = Pause()
    ddp = DistributedDataParallel(nn.Sequential(*layers, pause, nn.Linear(16, 16), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    bucket_mb: Any = "auto" if backend == "hop" else 0.001
    sync = torchext.attach(ddp, optimizer, on_peer_failure="continue", bucket_mb=bucket_mb)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()

    train(5)
    sync.synchronize()
    if rank.rank == 2:
        rank.report("ready")
        rank.pause()
    pause.armed = True
    train(1)
    train(10)
    sync.synchronize()
    equal_everywhere(ddp.module)
    return sync.stats()["workers"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_death_in_the_middle_of_a_forward_pass(backend: str) -> None:
    with launch(body_in_forward, 4, backend) as ranks:
        ranks.expect("ready", [2])
        time.sleep(0.3)
        ranks.kill(2)
        assert ranks.values() == [3] * 3


def body_exception(rank: Rank, backend: str) -> bool:
    training = ElasticTraining(rank, backend, {})  # of the world: its workers look for newcomers together
    training.train(3)
    for _ in range(2):
        with contextlib.suppress(KeyError), training.sync.averaged():
            if rank.rank == 0:
                raise KeyError("a metric")
        training.train(3)
    training.sync.synchronize()
    lost = training.sync.stats()["lost_ranks"]
    training.sync.detach()
    return bool(lost)


def test_an_exception_of_one_rank_in_an_average() -> None:
    rows = {backend: (backend,) for backend in ("prague", "dssync", "hop")}
    assert row_values(body_exception, 3, rows) == {backend: [False] * 3 for backend in rows}
