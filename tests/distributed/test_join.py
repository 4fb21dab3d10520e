"""A worker comes to a job that is running: ``torchext.join``."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attached import GoingOn, equal_everywhere, flat, freeze_when_connecting, mlp
from harness import Rank, launch, run_ranks
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import _membership
from torchext._newcomers import Door, Newcomer
from torchext.errors import BackendOptionsError

BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {"order": "atc", "group_size": 3}),
    ("prague", {"generator": "static"}),
    ("dssync", {}),
    ("hop", {"backup_workers": 1, "max_iteration_gap": 4}),
    ("hop", {"weights": [[0.6, 0.4, 0], [0, 0.6, 0.4], [0.4, 0, 0.6]]}),
]


def train_until(training: GoingOn, workers: int, limit: float = 30.0) -> None:
    """Meets the others now and then, until there are so many."""
    end = time.monotonic() + limit
    while training.workers() != workers:
        assert time.monotonic() < end, training.sync.stats()
        training.train(3)
        training.sync.synchronize()


def body_joins(rank: Rank, backend: str, options: dict[str, Any], workers: int) -> Any:
    if rank.rank >= workers:
        rank.pause()
    training = GoingOn(rank, backend, options, workers=workers)
    if rank.rank < workers:
        training.train(8)
        rank.report("trains")
    train_until(training, rank.size)
    # The newcomer is as far as the others, and has what they have.
    equal_everywhere(training.ddp.module)
    momentum = [state["momentum_buffer"].norm().item() for state in training.optimizer.state.values()]
    steps = training.sync.state_dict()["steps"]
    before = training.sync.stats()
    training.train(20)
    after = training.sync.stats()
    assert after["averages"] - before["averages"] >= 4, (before, after)
    with training.sync.averaged() as module:
        equal_everywhere(module)
    place = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    training.sync.detach()
    return steps, place, momentum, after


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=str)
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
    training = GoingOn(rank, backend, {}, workers=3)
    if rank.rank < 3:
        training.train(5)
        rank.report("trains")
        while training.workers() == 3:
            training.train(1)
        rank.report("two left")
        train_until(training, 3)
    training.train(10)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return dist.get_rank(), stats["workers"], stats["lost_ranks"], stats["joined_ranks"]


@pytest.mark.parametrize("backend", ["prague", "dssync", "hop"])
def test_a_newcomer_takes_the_place_of_the_dead(backend: str) -> None:
    with launch(body_replaced, 4, backend) as ranks:
        ranks.expect("trains", [0, 1, 2])
        ranks.kill(0)
        ranks.expect("two left", [1, 2])
        ranks.proceed([3])
        assert ranks.values() == [(place, 3, [0], [3]) for place in range(3)]


class Peculiar(torch.nn.Module):
    """Has more than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.extra = 0
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("none", None, persistent=False)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def body_peculiar(rank: Rank) -> Any:
    if rank.rank == 2:
        rank.pause()
    module = Peculiar()
    training = GoingOn(rank, "prague", {}, workers=2, module=module)
    group = training.optimizer.param_groups[0]
    if rank.rank < 2:
        module.extra = 7
        module.seen.fill_(3)
        module.count.fill_(4)
        group["lr"], group["betas"] = np.float64(0.03), (np.float32(0.5), 0.9)  # a schedule's
        rank.report("trains")
    train_until(training, 3)
    return module.extra, module.seen.tolist(), int(module.count), group["lr"], group["betas"]


def test_a_newcomer_gets_all_that_a_model_has() -> None:
    with launch(body_peculiar, 3) as ranks:
        ranks.expect("trains", [0, 1])
        ranks.proceed([2])
        assert ranks.values() == [(7, [3, 3], 4, 0.03, (0.5, 0.9))] * 3


# ---- Who is not let in, and who is gone ----


def refused(
    rank: Rank,
    match: str,
    module: torch.nn.Module,
    backend: str = "prague",
    options: Any = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> None:
    """make_optimizer: of the parameters."""
    torchext.join(backend, f"file://{rank.folder / 'store'}", pg_options=options)
    ddp = DistributedDataParallel(module)
    optimizer = make_optimizer(list(ddp.parameters()), lr=0.1)
    with pytest.raises(ValueError, match=match):
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    dist.destroy_process_group()


def in_groups(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=lr)


def in_another_order(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[::-1], lr=lr)


def body_refused(rank: Rank) -> Any:
    if rank.rank == 2:
        rank.pause()
        other = torch.nn.Linear(3, 3)
        its = r"its options is Prague.*sync_period=2.* the job's is .*sync_period=1"
        refused(rank, its, other, options=torchext.PragueOptions(sync_period=2))
        its = r"its model has weight \(float32, \(3, 3\), strides \(3, 1\)\) where the job's has \S+ \("
        refused(rank, its, other)
        refused(rank, r"its backend is hop, the job's is prague", other, backend="hop")
        transposed = mlp()
        transposed[2].weight = torch.nn.Parameter(transposed[2].weight.detach().t())  # a square one
        its = (
            r"its model has 2\.weight \(.*, strides \(1, 16\)\) where the job's has 2\.weight \(.*, strides \(16, 1\)\)"
        )
        refused(rank, its, transposed)
        its = r"its optimizer is Adam, the job's is SGD"
        refused(rank, its, mlp(), make_optimizer=torch.optim.Adam)
        its = r"its optimizer has groups of 2, 4 parameters, the job's has groups of 6"
        refused(rank, its, mlp(), make_optimizer=in_groups)
        its = r"its optimizer has 4\.bias at place 0 of group 0, where the job's has 0\.weight"
        refused(rank, its, mlp(), make_optimizer=in_another_order)
        rank.report("refused")
    training = GoingOn(rank, "prague", {}, workers=2)
    if rank.rank < 2:
        rank.report("trains")
        train_until(training, 3)
    equal_everywhere(training.ddp.module)
    return training.sync.stats()["joined_ranks"]


def test_who_does_not_fit_is_refused_and_the_job_goes_on() -> None:
    with launch(body_refused, 3) as ranks:
        ranks.expect("trains", [0, 1])
        ranks.proceed([2])
        ranks.expect("refused", [2])
        assert ranks.values() == [[2]] * 3


class Choosy(Peculiar):
    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("not this one")


def body_choosy(rank: Rank, workers: int, extra: Any, match: str) -> Any:
    if rank.rank == workers:
        torchext.join("prague", f"file://{rank.folder / 'store'}")
        ddp = DistributedDataParallel(Choosy())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=match):
            torchext.attach(ddp, optimizer, on_peer_failure="continue")
        assert not dist.is_initialized()
        return 0
    module = Peculiar()
    module.extra = print if extra == "a function" else (_ for _ in ()) if extra == "a generator" else extra
    training = GoingOn(rank, "prague", {}, workers=workers, module=module)
    end = time.monotonic() + 30
    while not training.sync.stats()["lost_ranks"]:
        assert time.monotonic() < end, training.sync.stats()
        training.sync.synchronize()
    training.train(10)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["workers"], stats["lost_ranks"]


@pytest.mark.parametrize(
    ("workers", "extra", "match"),
    [
        (1, 7, r"cannot load what .* handed over \(RuntimeError: not this one\); make model and optimizer as"),
        (2, 7, r"\(RuntimeError: not this one\)"),
        (1, "a function", r"\(UnpicklingError: Weights only load failed"),
        (1, "a generator", r"RuntimeError: that worker could not save it: TypeError: cannot pickle 'generator' object"),
    ],
)
def test_a_newcomer_that_cannot_take_over_goes_and_the_job_goes_on(workers: int, extra: Any, match: str) -> None:
    with launch(body_choosy, workers + 1, workers, extra, match) as ranks:
        values = ranks.values()
    assert values[:workers] == [(workers, [workers])] * workers


def body_ghosts(rank: Rank) -> Any:
    """Rank 2 dies while it waits, rank 3 when the others wait for it; rank 4 joins."""
    _membership.CONNECTING = timedelta(seconds=3)
    if rank.rank == 2:
        torchext.join("prague", f"file://{rank.folder / 'store'}")
        ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
        rank.report("waits")
        torchext.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), on_peer_failure="continue")
    if rank.rank in (3, 4):
        rank.pause()
    if rank.rank == 3:
        real = Newcomer.ask

        def ask(self: Newcomer, *brought: Any) -> Any:
            answer = real(self, *brought)
            rank.report("let in")
            rank.pause()
            return answer

        Newcomer.ask = ask  # type: ignore[method-assign]
    if rank.rank < 2:
        rank.pause()  # until the ghost has left its request
    training = GoingOn(rank, "prague", {}, workers=2)
    if rank.rank < 2:
        rank.report("trains")
        train_until(training, 3)
    training.train(5)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["workers"], stats["lost_ranks"], len(stats["joined_ranks"]), flat(training.ddp.module).isfinite().all()


def test_newcomers_that_die_on_the_doorstep() -> None:
    with launch(body_ghosts, 5) as ranks:
        ranks.expect("waits", [2])
        time.sleep(0.5)
        ranks.kill(2)
        ranks.proceed([0, 1])
        ranks.expect("trains", [0, 1])
        ranks.proceed([3])
        ranks.expect("let in", [3])
        ranks.kill(3)
        ranks.proceed([4])
        assert [value[:3] for value in ranks.values()] == [(3, [], 1)] * 3


def body_heard_in_vain(rank: Rank) -> Any:
    """The first worker hears a newcomer, and dies before it lets it in."""
    if rank.rank == 3:
        rank.pause()
    if rank.rank == 0:

        def admit(*_: Any) -> None:
            rank.report("heard")
            rank.pause()

        Door.admit = admit  # type: ignore[method-assign]
    training = GoingOn(rank, "prague", {}, workers=3)
    if rank.rank < 3:
        rank.report("trains")
    end = time.monotonic() + 40
    while not training.sync.stats()["joined_ranks"]:
        assert time.monotonic() < end, training.sync.stats()
        training.train(1)
        training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["workers"], stats["lost_ranks"], stats["joined_ranks"]


def test_a_newcomer_is_heard_in_vain_and_comes_in_all_the_same() -> None:
    with launch(body_heard_in_vain, 4) as ranks:
        ranks.expect("trains", [0, 1, 2])
        ranks.proceed([3])
        ranks.expect("heard", [0])
        ranks.kill(0)
        assert ranks.values() == [(3, [0], [3])] * 3


def body_frozen_in_the_door(rank: Rank, frozen: int) -> Any:
    """Four workers and a newcomer make a group, and one of the five is gone when they connect."""
    _membership.CONNECTING = timedelta(seconds=2)
    if rank.rank == 5:
        rank.pause()
    if rank.rank == 4 and frozen == 4:
        freeze_when_connecting(rank)
    training = GoingOn(rank, "prague", {}, workers=4)
    if rank.rank == frozen:
        freeze_when_connecting(rank)
    if rank.rank < 4:
        rank.report("trains")
    end = time.monotonic() + 40
    while not (training.workers() == 4 + (frozen == 4) and training.sync.stats()["joined_ranks"]):
        assert time.monotonic() < end, training.sync.stats()
        training.train(3)
        training.sync.synchronize()
    training.train(5)
    training.sync.synchronize()
    equal_everywhere(training.ddp.module)
    stats = training.sync.stats()
    return stats["lost_ranks"], len(stats["joined_ranks"])


@pytest.mark.parametrize("frozen", [2, 4], ids=["a worker", "the newcomer"])
def test_one_is_gone_when_a_newcomer_comes(frozen: int) -> None:
    with launch(body_frozen_in_the_door, 6, frozen) as ranks:
        ranks.expect("trains", range(4))
        ranks.expect("frozen", [frozen], deadline=30)
        if frozen == 4:
            ranks.proceed([5])
        staying = [rank for rank in range(6) if rank != frozen and (rank != 5 or frozen == 4)]
        outcomes = ranks.outcomes(staying, deadline=50)
        ranks.kill(frozen)
        ranks.kill(5)
    lost = [2] if frozen == 2 else []
    assert [outcome.value for outcome in outcomes] == [(lost, 1)] * len(staying), outcomes


def body_arguments(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta, got 5 \(int\); timedelta\(seconds="):
        torchext.join("hop", store=dist.HashStore(), timeout=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout must be more than 0, got 0:00:00"):
        torchext.join("hop", store=dist.HashStore(), timeout=timedelta(0))
    for method in ("tcp://x:abc", "tcp://x:99999", "tcp://x:0", "tcp://x", "tcp://:29500", "bogus", "file://"):
        with pytest.raises(ValueError, match=rf"with a port in 1\.\.65535, got '{method}'"):
            torchext.join("hop", method)
    with pytest.raises(TypeError, match=r"init_method must be a str, got .*HashStore"):
        torchext.join("hop", dist.HashStore())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "localhost")
        for port in ("zzz", "", "-1", "65536"):
            patch.setenv("MASTER_PORT", port)
            with pytest.raises(
                ValueError, match=rf"MASTER_PORT in the environment must be in 1\.\.65535, got '{port}'"
            ):
                torchext.join("hop")
    with pytest.raises(TypeError, match=r"takes a process group of torch\.distributed, .* got 3 \(int\)"):
        torchext.backend_of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"backend must be one of 'dssync', 'hop', 'prague', got 'dear'"):
        torchext.join("dear")
    with pytest.raises(ValueError, match=r"init_method must be env://, tcp://host:port or file:///path, .*got 'tcp:4'"):
        torchext.join("hop", "tcp:4")
    with pytest.raises(ValueError, match=r"'env://' needs MASTER_ADDR and MASTER_PORT in the environment"):
        torchext.join("hop")
    with pytest.raises(BackendOptionsError, match=r"pass torchext\.HopOptions"):
        torchext.join("hop", pg_options=torchext.PragueOptions())
    assert not dist.is_initialized()
    torchext.join("prague", store=dist.HashStore(), timeout=timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match=r"torchext\.join after init_process_group"):
        torchext.join("prague", store=dist.HashStore())
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"no worker let this one in within 0\.5 s\. They do when all meet"):
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    assert time.monotonic() - start < 5
    with pytest.raises(dist.DistStoreError, match=r"no worker let this one in within 0\.5 s"):  # asks anew
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    dist.destroy_process_group()
    torchext.join("prague", store=dist.HashStore())
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"attached as those it joins are, with on_peer_failure='continue'"):
        torchext.attach(ddp, optimizer)
    assert dist.get_world_size() == 1


def body_second_try(rank: Rank) -> Any:
    """What attach refuses by itself costs a newcomer nothing, nor the others: the next call is let in."""
    real = torchext.attach

    def attach(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, **arguments: Any) -> Any:
        with pytest.raises(ValueError, match=r"with on_peer_failure='continue'"):
            real(ddp, optimizer)
        refused = DistributedDataParallel(torch.nn.Linear(2, 2))
        refused.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
        with pytest.raises(ValueError, match=r"has a communication hook"):
            real(refused, torch.optim.SGD(refused.parameters(), lr=0.1), **arguments)
        return real(ddp, optimizer, **arguments)

    if rank.rank == 2:
        rank.pause()
        torchext.attach = attach
    training = GoingOn(rank, "prague", {}, workers=2)
    if rank.rank < 2:
        rank.report("trains")
    train_until(training, 3)
    equal_everywhere(training.ddp.module)
    return training.sync.stats()["joined_ranks"]


def test_a_newcomer_may_attach_again() -> None:
    with launch(body_second_try, 3) as ranks:
        ranks.expect("trains", [0, 1])
        ranks.proceed([2])
        assert ranks.values() == [[2]] * 3


def test_arguments() -> None:
    run_ranks(body_arguments, 1)
