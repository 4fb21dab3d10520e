"""A worker dies, the others train on: ``dist.shrink_group``, and ``attach(..., on_peer_failure="continue")``."""

from __future__ import annotations

import contextlib
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import GoingOn, equal_everywhere, freeze_when_connecting
from harness import Rank, elapsed_error, launch, run_ranks
from interpreters import run_script
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import _membership
from torchext.backends import BACKENDS

SHRINK_ABORT = 1


# ---- shrink_group ----


def body_shrink(rank: Rank, backend: str) -> Any:
    rank.init(backend)
    dist.all_reduce(torch.ones(3))
    rank.report("ready")
    error = elapsed_error(lambda: [dist.all_reduce(torch.ones(3)) for _ in range(1_000_000)])
    sizes = []
    # Rank 2 is dead; of what is left, the rank that was 0 goes in good order.
    for excluded in ([2], [0]):
        if dist.get_rank() in excluded:
            return error, sizes
        group = dist.shrink_group(excluded, shrink_flags=SHRINK_ABORT)
        assert group is dist.group.WORLD and dist.get_backend() == backend
        tensor = torch.full((1000,), float(rank.rank))
        dist.all_reduce(tensor)
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rank.rank)
        sizes.append((dist.get_rank(), dist.get_world_size(), gathered, tensor.unique().tolist()))
        DistributedDataParallel(nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    return error, sizes


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_failed_group_shrinks_to_the_living(backend: str) -> None:
    with launch(body_shrink, 4, backend) as ranks:
        ranks.expect("ready")
        ranks.kill(2)
        outcomes = ranks.outcomes(deadline=30)
    assert all(outcome.ok for outcome in outcomes), outcomes
    errors, sizes = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert all("rank 2 died" in error[1] for error in errors), errors
    three, two = ([0, 1, 3], [4.0]), ([1, 3], [4.0])
    assert sizes[0] == [(0, 3, *three)]
    assert sizes[1] == [(1, 3, *three), (0, 2, *two)]
    assert sizes[2] == [(2, 3, *three), (1, 2, *two)]


def body_shrink_in_order(rank: Rank) -> Any:
    """A group that is well, and a part of the world."""
    rank.init("prague")
    part = dist.new_group([1, 2, 3], backend="prague", pg_options=torchext.PragueOptions(group_size=3))
    if rank.rank == 1:
        with pytest.raises(NotImplementedError, match=r"shrink_group takes no pg_options"):
            dist.shrink_group([1], part, pg_options=torchext.PragueOptions())
    if rank.rank not in (1, 3):
        dist.barrier()
        return None
    shrunk = dist.shrink_group([1], part)
    tensor = torch.full((5,), float(rank.rank))
    dist.all_reduce(tensor, group=shrunk)
    options = torchext.backend_of(shrunk).options
    dist.barrier()  # of the world, which is as it was
    return tensor.tolist(), options.group_size, list(options.global_ranks_in_group)


def test_a_part_of_the_world_shrinks() -> None:
    results = run_ranks(body_shrink_in_order, 4)
    assert results == [None, ([4.0] * 5, 2, [1, 3]), None, ([4.0] * 5, 2, [1, 3])]


# ---- Training goes on ----


def body_continue(rank: Rank, backend: str, options: dict[str, Any], sizes: list[int]) -> Any:
    training = GoingOn(rank, backend, options)
    first = training.validation_loss()
    training.train(5)
    for size in sizes:
        rank.report(f"ready for {size}")
        while training.workers() > size:
            training.train(1)
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
    return first, training.validation_loss(), after


DEATHS: list[tuple[list[int], str, dict[str, Any]]] = [
    ([2], "prague", {"order": "atc"}),
    ([0], "prague", {}),  # it hosts the generator
    ([0, 2, 1], "prague", {"generator": "random"}),  # until one is left
    ([1], "prague", {"generator": "static", "group_size": 4}),
    ([3], "dssync", {}),
    ([0, 1], "dssync", {"schedule": "random", "order": "atc"}),
    ([2], "dssync", {"schedule": "topology", "racks": [0, 1, 0, 1]}),
    ([2], "hop", {}),
    ([0], "hop", {"order": "serial"}),
    ([1], "hop", {"backup_workers": 1, "max_iteration_gap": 4}),
    ([2], "hop", {"staleness": 3, "max_iteration_gap": 4, "max_jump": 4}),
    ([3], "hop", {"weights": [[0.6, 0.4, 0, 0], [0, 0.6, 0.4, 0], [0, 0, 0.6, 0.4], [0.4, 0, 0, 0.6]]}),
]


@pytest.mark.parametrize(
    ("victims", "backend", "options", "workers"),
    [*((*death, 4) for death in DEATHS), ([5, 0], "prague", {}, 8)],
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
            first, last, stats = outcome.value
            assert last < 0.8 * first
            assert stats["lost_ranks"] == victims and stats["workers"] == sizes[-1]
            assert 0 < stats["recovery_ms"] < 10_000 * len(victims)


def body_average(rank: Rank, backend: str, options: dict[str, Any]) -> Any:
    """The dead is missed in an exact average, which the others form without it."""
    training = GoingOn(rank, backend, options)
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


@pytest.mark.parametrize("backend", ["prague", "dssync", "hop"])
def test_an_average_is_formed_without_the_dead(backend: str) -> None:
    with launch(body_average, 4, backend, {}) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        for outcome in ranks.outcomes(deadline=30):
            assert outcome.ok, outcome.trace
            assert outcome.value == 3


def body_frozen(rank: Rank, backend: str, frozen: int) -> Any:
    _membership.CONNECTING = timedelta(seconds=2)
    training = GoingOn(rank, backend, {})
    training.train(5)
    if rank.rank == frozen:
        freeze_when_connecting(rank)
    rank.report("ready")
    while training.workers() > 3:
        training.train(1)
    training.train(10)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    return training.sync.stats()["lost_ranks"], dist.get_world_size()


SCRIPT = """
    import os, sys, time
    import torch, torch.distributed as dist, torchext
    from torch.nn.parallel import DistributedDataParallel

    backend, how, path = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=3)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    sync = torchext.attach(ddp, optimizer, on_peer_failure="continue")
    steps = 0
    while sync.stats()["workers"] == 3 or steps < 50:
        if rank == 1 and steps == 20:
            if how == "exit":
                sys.exit()
            raise KeyError("no such sample")
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        steps += 1
        time.sleep(0.005)
    sync.synchronize()
    print(sync.stats()["workers"], sync.stats()["lost_ranks"])
"""


@pytest.mark.parametrize(
    ("backend", "how"), [("prague", "raise"), ("dssync", "raise"), ("hop", "raise"), ("hop", "exit")]
)
def test_the_others_train_on_when_a_script_ends(tmp_path: Path, backend: str, how: str) -> None:
    ends = run_script(tmp_path, SCRIPT, 3, backend, how, str(tmp_path / "store"))
    assert [ended.code for ended in ends] == [0, int(how == "raise"), 0], ends
    for rank in (0, 2):
        assert ends[rank].out.strip() == "2 [1]", ends[rank]


@pytest.mark.parametrize(("backend", "frozen"), [("prague", 2), ("hop", 2), ("prague", 0)])
def test_one_is_gone_when_the_others_connect(backend: str, frozen: int) -> None:
    """It has come to the new group and is missed there: not for the whole timeout of a group."""
    with launch(body_frozen, 5, backend, frozen) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        ranks.expect("frozen", [frozen], deadline=30)
        outcomes = ranks.outcomes([rank for rank in range(5) if rank not in (1, frozen)], deadline=40)
        ranks.kill(frozen)
    assert [outcome.value for outcome in outcomes] == [(sorted([1, frozen]), 3)] * 3, outcomes


def body_late(rank: Rank) -> Any:
    _membership.PATIENCE = timedelta(seconds=6)
    real = _membership.Membership._form

    def form(self: Any, decided: Any, attempt: int) -> None:
        if rank.rank == 2 and attempt == 0:
            time.sleep(8)  # a long step: the others have given the first group up
        real(self, decided, attempt)

    _membership.Membership._form = form  # type: ignore[method-assign]
    training = GoingOn(rank, "prague", {})
    training.train(3)
    rank.report("ready")
    while training.workers() == 5:
        training.train(1)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    return training.sync.stats()["lost_ranks"], dist.get_world_size()


def test_who_comes_too_late_to_a_new_group_comes_to_the_next() -> None:
    with launch(body_late, 5) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        assert [outcome.value for outcome in ranks.outcomes(deadline=60)] == [([1], 4)] * 4


def body_stopped(rank: Rank) -> Any:
    training = GoingOn(rank, "prague", {"heartbeat_timeout": timedelta(seconds=1.5)})
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


@pytest.mark.parametrize("backend", ["prague", "dssync", "hop"])
def test_a_death_in_the_middle_of_a_forward_pass(backend: str) -> None:
    with launch(body_in_forward, 4, backend) as ranks:
        ranks.expect("ready", [2])
        time.sleep(0.3)
        ranks.kill(2)
        assert ranks.values() == [3] * 3


def body_exception(rank: Rank, backend: str) -> bool:
    training = GoingOn(rank, backend, {})
    training.train(3)
    for _ in range(2):
        with contextlib.suppress(KeyError), training.sync.averaged():
            if rank.rank == 0:
                raise KeyError("a metric")
        training.train(3)
    training.sync.synchronize()
    return bool(training.sync.stats()["lost_ranks"])


@pytest.mark.parametrize("backend", ["prague", "dssync", "hop"])
def test_an_exception_of_one_rank_in_an_average(backend: str) -> None:
    assert run_ranks(body_exception, 3, backend) == [False] * 3


# ---- Where it cannot ----


def body_refused(rank: Rank) -> None:
    rank.init("dear", store="dear")
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"dear's workers hold a slice .* torchrun --max-restarts"):
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    with pytest.raises(ValueError, match=r"'raise' or 'continue', got 'ignore'"):
        torchext.attach(ddp, optimizer, on_peer_failure="ignore")  # type: ignore[arg-type]


def test_refused() -> None:
    run_ranks(body_refused, 2)


def body_all_alive(rank: Rank) -> tuple[str, str, float]:
    training = GoingOn(rank, "prague", {})
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
