"""A worker of an attached model is killed, or its script just ends: who learns of it, and how fast."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS, Trainer, mlp, prague
from case_choice import slow_on
from harness import Rank, elapsed_error, launch
from interpreters import run_script
from rows import run_rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

SLOW = pytest.mark.slow

DEATH_LIMIT = 5.0


HIT_AFTER = 0.1  # seconds of training


def body_training(
    rank: Rank, victim: int, signum: int, backend: str, options: dict[str, Any], timeout: float = 60
) -> Any:
    """Trains until a signal hits the victim, which is to be a child of its own; how each of the others learns of it."""
    pg_options = OPTIONS[backend](timeout=timedelta(seconds=timeout), **options)
    rank.init(backend, timeout=timeout, pg_options=pg_options)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = torchext.attach(ddp, optimizer)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()

    train(5)
    dist.barrier()
    if rank.rank == victim:
        threading.Timer(HIT_AFTER, os.kill, (os.getpid(), signum)).start()
    error = elapsed_error(lambda: train(1_000_000))
    later = elapsed_error(sync.synchronize)
    start = time.monotonic()
    with contextlib.suppress(dist.DistBackendError):  # what it owes the others cannot be sent any more
        sync.detach()
    return error, later, time.monotonic() - start


# Rank 3 is never the victim: it outlives all rows, and ends its groups behind each.
DEATHS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "prague", {"order": "atc"}),
    (0, "prague", {"order": "atc"}),  # it hosts the generator
    (1, "prague", {}),
    (2, "prague", {"generator": "static"}),
    (0, "prague", {"generator": "ready-set", "order": "atc"}),
    (0, "prague", {"generator": "random"}),
    (1, "dssync", {"order": "atc"}),
    (0, "dssync", {"schedule": "random"}),
    (2, "dssync", {"schedule": "topology", "racks": [0, 1, 0, 1]}),
    (2, "hop", {}),
    (0, "hop", {"order": "serial"}),
    (1, "hop", {"graph": "ring"}),  # its opposite has no line to it
    (1, "hop", {"backup_workers": 1, "max_iteration_gap": 4}),
    (1, "hop", {"staleness": 3, "max_iteration_gap": 4, "max_jump": 4}),
    (2, "hop", {"notify_ack": True}),
    (2, "hop", {"weights": [[0.6, 0.4, 0, 0], [0, 0.6, 0.4, 0], [0, 0, 0.6, 0.4], [0.4, 0, 0, 0.6]]}),
    (0, "dear", {}),  # in the trial of all-reduce
    (2, "dear", {"allreduce_fallback": False}),
    (1, "dear", {"allreduce_fallback": False, "form": "replicated", "bucket_mb": 0.01}),
    (1, "dear", {"allreduce_fallback": False, "transport": "collectives"}),
]
# Two workers: test_flight_recorder.py.
DEATHS_OF_EIGHT: list[tuple[int, str, dict[str, Any]]] = [(5, "hop", {"graph": "ring"}), (6, "prague", {})]


@pytest.mark.parametrize(("size", "deaths"), [(4, DEATHS), (8, DEATHS_OF_EIGHT)], ids=["4", "8"])
def test_sigkill_in_training(size: int, deaths: list[tuple[int, str, dict[str, Any]]]) -> None:
    rows = {f"{victim} of {backend} {options}": (victim, backend, options) for victim, backend, options in deaths}
    arguments = {name: (victim, int(signal.SIGKILL), *how) for name, (victim, *how) in rows.items()}
    found = run_rows(body_training, size, arguments, victims={row[0] for row in rows.values()}, deadline=40)
    for name, (victim, backend, _) in rows.items():
        outcomes = found[name]
        assert outcomes[victim].message == f"exit code {-signal.SIGKILL}", (name, outcomes[victim])
        for outcome in (other for other in outcomes if other.rank != victim):
            assert outcome.ok, (name, outcome.trace)
            (kind, text, seconds), later, detach_seconds = outcome.value
            assert kind == "DistBackendError", (name, kind, text)
            assert f"rank {victim} died" in text and backend in text, (name, text)
            assert later[0] == "DistBackendError" and f"rank {victim} died" in later[1], (name, later)
            assert later[2] < 1 and detach_seconds < 1, (name, later[2], detach_seconds)
            assert seconds < HIT_AFTER + DEATH_LIMIT, (name, seconds)


class SlowStore(dist.Store):
    """Holds what a failure sets off."""

    def set(self, key: str, value: bytes) -> None:
        time.sleep(5)


def body_deadline(rank: Rank) -> Any:
    """Rank 2 dies between its question and the deadline at which the generator answers it."""
    mlp()(torch.ones(1, 8)).sum().backward()  # the first takes its time
    rank.init()
    group = prague(generator="ready-set", order="atc", group_size=4)
    store = SlowStore()
    if rank.rank == 0:
        torchext.backend_of(group)._announce_member(store, 0)  # so that the generator is told late
    trainer = Trainer(rank, group=group)
    time.sleep(0.2 * rank.rank)  # from which it takes that four are there within a second
    trainer.step()
    trainer.sync.wait()
    rank.report("ready")
    rank.pause()
    if rank.rank in (0, 3):
        time.sleep(6)
    else:
        trainer.step()
        rank.report("asked")
    return elapsed_error(lambda: trainer.run(1_000_000))


def test_sigkill_before_the_generator_answers() -> None:
    with launch(body_deadline, 4) as ranks:
        ranks.expect("ready")
        ranks.proceed()
        ranks.expect("asked", [1, 2])
        ranks.kill(2)
        for outcome in ranks.outcomes(deadline=20):
            assert outcome.ok, outcome
            kind, text, _ = outcome.value
            assert kind == "DistBackendError" and "rank 2 died" in text, (outcome.rank, text)


def body_slow(rank: Rank, generator: str, heartbeat: float) -> Any:
    """Rank 2 lives, and takes longer than the group's timeout: in a step, or stopped where nobody waits for steps."""
    options = OPTIONS["prague"](
        generator=generator,
        order="atc",
        group_size=0 if generator == "static" else 2,
        heartbeat_timeout=timedelta(seconds=heartbeat),
    )
    rank.init("prague", timeout=2, pg_options=options)
    trainer = Trainer(rank, group=dist.group.WORLD)
    if rank.rank == 2:  # the others may meet it before they have made as many steps
        trainer.run(3)
        if generator == "static":
            time.sleep(5)
        else:
            rank.report("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
    return elapsed_error(lambda: trainer.run(1_000_000))


# Slow: another generator of the same service.
@pytest.mark.parametrize(
    ("generator", "heartbeat"),
    [pytest.param("random", 0, marks=SLOW), ("smart", 0), ("static", 0), ("static", 2)],
)
def test_a_rank_that_takes_too_long_is_not_said_to_have_died(generator: str, heartbeat: float) -> None:
    """Some wait for the generator meanwhile, which waits for those that wait for the slow rank."""
    for _ in range(4):
        with launch(body_slow, 5, generator, heartbeat) as ranks:
            if generator != "static":
                ranks.expect("stops", [2])
                time.sleep(5)
                ranks.kill(2, signal.SIGCONT)
            if not ranks.wait_until(lambda _, done: len(done) == 5, deadline=20):
                continue  # nobody was to meet the slow rank just then, and all train on
            for outcome in ranks.outcomes():
                assert outcome.ok, outcome.trace
                kind, text, _ = outcome.value
                assert kind == "DistBackendError", (kind, text)
                assert re.search("timed out|no group from the generator|has rank . left", text), text
                # Without heartbeats nobody is told of another's timeout, and its closed connections may come first.
                assert "died" not in text and not re.search("lost its connections.* with rank 2", text), text
            return
    raise AssertionError("the slow rank was in no group, four times")


STOPS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {"generator": "static", "order": "atc"}),
    # Not the default generator: it may leave two slow workers out, and the others train on until a heartbeat misses.
    ("prague", {"generator": "random"}),
    ("dssync", {}),
    ("hop", {}),
    ("hop", {"order": "serial", "graph": "ring"}),
    ("hop", {"backup_workers": 1, "max_iteration_gap": 4}),
    ("dear", {"allreduce_fallback": False}),
    ("dear", {"allreduce_fallback": False, "transport": "collectives"}),
]


def test_sigstop_in_training_honours_the_timeout() -> None:
    victim, timeout = 2, 3
    late = {"heartbeat_timeout": timedelta(seconds=60)}  # or its silence would end the group, whatever the timeout
    rows = {
        f"{backend} {options}": (victim, int(signal.SIGSTOP), backend, {**late, **options}, timeout)
        for backend, options in STOPS
    }
    for name, outcomes in run_rows(body_training, 4, rows, victims={victim}, deadline=40).items():
        backend = rows[name][2]
        texts = []
        for outcome in (other for other in outcomes if other.rank != victim):
            assert outcome.ok, (name, outcome.trace)
            (kind, text, seconds), later, _ = outcome.value
            assert kind == "DistBackendError" and backend in text and "silent" not in text, (name, kind, text)
            assert later[0] == "DistBackendError" and later[2] < 1, (name, later)
            assert timeout - 1 < seconds < HIT_AFTER + timeout + DEATH_LIMIT, (name, seconds)
            texts.append(text)
        if backend == "hop":
            # The first to give up says what for: the stopped one's model, or that it takes the own one. Who hears of it
            # only when the first has closed its connections says that.
            said = (re.search(r"waited 3000 ms for .*(from rank|to go out to ranks)", text) for text in texts)
            assert any(said), (name, texts)


# ---- Scripts that end ----

SCRIPT = """
    import os
    import sys
    import time
    import torch
    import torch.distributed as dist
    import torchext

    store, mode, backend, order = sys.argv[1:]
    rank = int(os.environ["RANK"])
    options = {
        "prague": lambda: torchext.PragueOptions(order=order),
        "dssync": lambda: torchext.DSSyncOptions(order=order),
        "hop": lambda: torchext.HopOptions(order=order),
        "dear": lambda: torchext.DeAROptions(form=order, allreduce_fallback=False),
    }[backend]()
    dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=3, pg_options=options)
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = torchext.attach(ddp, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    if mode == "detach":
        sync.detach()
    if mode == "destroy":
        dist.destroy_process_group()
    if mode == "averaged":
        with sync.averaged() as module:
            print(float(module.weight.detach().sum()))
    if mode == "dropped":
        del sync, ddp, optimizer
    if mode == "early" and rank == 1:
        dist.destroy_process_group()
        time.sleep(10)
    if mode == "exception" and rank == 1:
        raise ValueError("on purpose")
    if mode in ("exception", "early") and dist.is_initialized():
        while True:
            optimizer.zero_grad()
            ddp(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    print("end")
"""


# Of the options, what changes most at the end; for dear its form.
WAYS = [
    ("prague", "cta"),
    ("prague", "atc"),
    ("dssync", "cta"),
    ("hop", "parallel"),
    ("hop", "serial"),
    ("dear", "sharded"),
]


@pytest.mark.parametrize(("backend", "order"), slow_on(WAYS, "dssync"))
@pytest.mark.parametrize("mode", ["nothing", "detach", "destroy", "averaged", "dropped"])
def test_a_script_ends_cleanly(tmp_path: Path, mode: str, backend: str, order: str) -> None:
    for ended in run_script(tmp_path, SCRIPT, 3, str(tmp_path / "store"), mode, backend, order):
        assert ended.code == 0, ended
        assert ended.out.endswith("end\n"), ended
        assert "Traceback" not in ended.err and "terminate called" not in ended.err and "Error" not in ended.err, ended


# Slow: a second order of the same synchronizer, and dssync, whose synchronizer is prague's.
ONCE_A_SYNCHRONIZER = [
    pytest.param(*way, marks=() if way in (("prague", "cta"), ("hop", "parallel"), ("dear", "sharded")) else SLOW)
    for way in WAYS
]


@pytest.mark.parametrize(("backend", "order"), ONCE_A_SYNCHRONIZER)
def test_an_exception_in_training_reaches_the_others(tmp_path: Path, backend: str, order: str) -> None:
    results = run_script(tmp_path, SCRIPT, 3, str(tmp_path / "store"), "exception", backend, order)
    for rank, ended in enumerate(results):
        assert ended.code == 1, ended
        assert "terminate called" not in ended.err, ended
        assert ("ValueError: on purpose" if rank == 1 else "rank 1") in ended.err, ended
        assert rank == 1 or "DistBackendError" in ended.err, ended


@pytest.mark.parametrize(
    ("backend", "order"),
    [pytest.param("dssync", "cta", marks=SLOW), ("dssync", "atc"), ("dear", "sharded")],
)
def test_who_ends_early_ends_the_others(tmp_path: Path, backend: str, order: str) -> None:
    """As with DDP, they need it in their next step: an error at once, and no wait for the group's timeout."""
    start = time.monotonic()
    results = run_script(tmp_path, SCRIPT, 3, str(tmp_path / "store"), "early", backend, order)
    assert [ended.code for ended in results] == [1, 0, 1], results
    for rank in (0, 2):
        assert "DistBackendError" in results[rank].err and "rank 1" in results[rank].err, results[rank]
    assert time.monotonic() - start < 90  # most of it starts processes; the group's timeout is longer
