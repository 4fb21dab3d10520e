"""Python's signal handlers run while a rank waits for another, and what they raise ends the wait.

Nobody else brings the handler to run: the peer comes to the call only when the handler has told it to.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS
from case_choice import slow_on
from harness import Rank, elapsed_error, run_ranks
from rows import Rows, await_others, row_values
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.backends import backend_of

pytestmark = pytest.mark.sanitize

Cases = Sequence[tuple[Any, ...]]


@contextmanager
def handling(handler: Callable[..., None], seconds: float = 0.5) -> Iterator[None]:
    """A signal that comes in half a second, when this rank waits."""
    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


def init(rank: Rank, backend: str, timeout: float = 30.0) -> None:
    more = {"allreduce_fallback": False, "bucket_mb": 1.0} if backend == "dear" else {}  # no plain DDP, no other plans
    rank.init(backend, timeout=timeout, pg_options=OPTIONS[backend](timeout=timeout, **more))


class Training:
    """A model, and the ways in which its worker waits for the other."""

    def __init__(self, backend: str, group: dist.ProcessGroup | None = None) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.sync = torchext.attach(self.ddp, self.optimizer)
        for _ in range(8):  # past what a backend measures first
            self.step()
        dist.barrier(group)  # in which a worker that is ahead still averages with the other

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def steps(self) -> None:
        for _ in range(20):  # hop lets a worker run ahead
            self.step()
        self.sync.detach()  # with prague the other may still wait for an average

    def wait(self, what: str) -> None:
        if what == "all_reduce":
            dist.all_reduce(torch.ones(3))
        elif what == "wait with a limit":
            dist.all_reduce(torch.ones(3), async_op=True).wait(dist.distributed_c10d.default_pg_timeout)
        elif what == "many calls":  # more than may wait for the first, which the peer has to agree to
            works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(1100)]
            for work in works:
                work.wait()
        elif what == "partial_all_reduce":
            backend_of(None).partial_all_reduce(torch.ones(3), [0, 1]).wait()
        elif what == "training":
            self.steps()
        elif what == "forward":  # in which dear waits for what it sends of the backward pass before
            for _ in range(2):
                self.ddp(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
        elif what == "synchronize":
            self.sync.synchronize()
        elif what == "destroy":
            dist.destroy_process_group()
        else:
            assert what == "detach", what
            self.sync.detach()


def body_flag(rank: Rank, backend: str, what: str) -> Any:
    """The handler sets a flag, as those that write a checkpoint before the job is stopped; the wait goes on."""
    init(rank, backend)
    training = Training(backend)
    store = FileStore(str(rank.folder / "flags"), 2)
    if rank.rank == 1:
        store.wait(["handled"])
        training.wait(what)
        return True
    on_thread: list[bool] = []

    def handler(*_: Any) -> None:
        on_thread.append(threading.current_thread() is threading.main_thread())
        store.set("handled", "1")

    with handling(handler, seconds=4.0 if what == "many calls" else 0.5):  # they have been made by then
        training.wait(what)
    return on_thread == [True]


def tables(quick: Cases, slow: Cases) -> pytest.MarkDecorator:
    """Rows by their names. Slow: another backend with the same waits."""
    quick_rows, slow_rows = ({", ".join(map(str, case)): case for case in cases} for cases in (quick, slow))
    marked = [pytest.param(quick_rows, id="quick")]
    if slow_rows:
        marked.append(pytest.param(slow_rows, id="slow", marks=pytest.mark.slow))
    return pytest.mark.parametrize("rows", marked)


SYNCHRONIZED = ("training", "synchronize", "detach")


@tables(
    [
        *(("prague", what) for what in ("all_reduce", "wait with a limit", "partial_all_reduce", "training")),
        *(("prague", what) for what in ("synchronize", "detach", "destroy")),
        ("torchext", "many calls"),
        *(("hop", what) for what in SYNCHRONIZED),
        *(("dear", what) for what in ("all_reduce", "training", "forward")),
    ],
    [
        *((name, "many calls") for name in ("dear", "dssync", "hop", "prague")),
        *(("dssync", what) for what in SYNCHRONIZED),
    ],
)
def test_handlers_run_in_a_wait(rows: Rows) -> None:
    assert row_values(body_flag, 2, rows) == {row: [True, True] for row in rows}


class Stop(Exception):
    pass


def body_rendezvous(rank: Rank, backend: str, missing: int) -> str:
    """The others wait for a rank that comes when a handler has run on each of them."""
    store = FileStore(str(rank.folder / "flags"), 3)
    if rank.rank == missing:
        store.wait([f"handled{other}" for other in range(3) if other != missing])
        init(rank, backend)
    else:
        with handling(lambda *_: store.set(f"handled{rank.rank}", "1")):
            init(rank, backend)
    dist.destroy_process_group()
    return "met"


@tables([("prague", 0), ("prague", 2)], [("dssync", 0), ("hop", 0), ("dear", 0)])
def test_handlers_run_in_the_rendezvous(rows: Rows) -> None:
    assert row_values(body_rendezvous, 3, rows) == {row: ["met"] * 3 for row in rows}


def body_raise(rank: Rank, backend: str, what: str) -> Any:
    init(rank, backend)
    training = Training(backend)
    store = FileStore(str(rank.folder / "flags"), 2)
    if rank.rank == 1:
        store.wait(["raised"])
        try:
            training.wait(what)
        except dist.DistBackendError as error:
            return str(error)
        return "went on"

    def handler(*_: Any) -> None:
        raise Stop

    with handling(handler), pytest.raises(Stop):
        training.wait(what)
    store.set("raised", "1")
    return "raised"


@tables([("prague", "all_reduce"), ("prague", "synchronize"), ("hop", "synchronize")], [("dssync", "synchronize")])
def test_what_a_handler_raises_ends_the_wait(rows: Rows) -> None:
    """As Ctrl-C does. The call itself goes on, so that the peer gets its answer; not where all were to meet."""
    for row, (first, second) in row_values(body_raise, 2, rows).items():
        assert first == "raised", row
        if row.endswith("synchronize"):
            assert "rank 0 was interrupted" in second, (row, second)
        else:
            assert second == "went on", (row, second)


def body_raise_at_the_end(rank: Rank, backend: str) -> Any:
    """Rank 0 leaves, and is interrupted while it waits for rank 1, which takes its time over the next step."""
    init(rank, backend)
    training = Training(backend)
    store = FileStore(str(rank.folder / "flags"), 2)
    if rank.rank == 1:
        store.wait(["raised"])
        return elapsed_error(lambda: dist.all_reduce(torch.ones(3)))[:2]

    def handler(*_: Any) -> None:
        raise Stop

    if backend == "dssync":
        training.step()  # rank 1 does not come to its average
    elif backend == "dear":
        training.ddp(torch.ones(2, 4)).sum().backward()  # nor to its reduce-scatter
    with handling(handler, seconds=3), pytest.raises(Stop):  # by then it waits for rank 1
        dist.destroy_process_group()
    store.set("raised", "1")
    dist.destroy_process_group()  # once more: torch forgets the group
    return dist.is_initialized()


@tables([("prague",), ("dear",)], [("dssync",)])
def test_what_a_handler_raises_ends_the_wait_for_those_that_still_train(rows: Rows) -> None:
    for row, (initialized, (kind, text)) in row_values(body_raise_at_the_end, 2, rows).items():
        assert not initialized, row
        assert kind == "DistBackendError", (row, kind)
        assert "rank 0 was interrupted while it waited for those that still tr" in text, (row, text)


def body_raise_at_exit(rank: Rank) -> Any:
    """As when a process ends that has not destroyed its groups: in two of three rank 1 still trains with this one."""
    init(rank, "prague")
    groups = [dist.group.WORLD, *(dist.new_group(pg_options=OPTIONS["prague"](timeout=30.0)) for _ in range(2))]
    trainings = [Training("prague", group) for group in groups[:2]]
    store = FileStore(str(rank.folder / "flags"), 2)
    if rank.rank == 1:
        store.wait(["raised"])
        return [elapsed_error(partial(dist.all_reduce, torch.ones(3), group=group))[:2] for group in groups]

    def handler(*_: Any) -> None:
        raise Stop

    with handling(handler, seconds=3), pytest.raises(Stop):
        torchext._C.leave_all("")
    store.set("raised", "1")
    errors = [elapsed_error(partial(dist.all_reduce, torch.ones(3), group=group))[:2] for group in groups]
    del trainings
    return errors


def test_what_a_handler_raises_at_exit_ends_every_group() -> None:
    left, met = run_ranks(body_raise_at_exit, 2)
    assert [kind for kind, _ in left] == ["DistBackendError"] * 3, left
    assert [kind for kind, _ in met] == ["DistBackendError"] * 3, met
    assert all("rank 0" in text and "interrupted" in text for _, text in met), met


def body_end(rank: Rank, backend: str, what: str, together: bool) -> Any:
    """The handler ends the group and returns, as one that leaves before the job is stopped; with the other or alone."""
    init(rank, backend, timeout=5.0)  # what its end may have to wait for
    training = Training(backend)
    store = FileStore(str(rank.folder / "flags"), 2)
    if rank.rank == 1:
        store.wait(["handled"])
        if together:
            dist.destroy_process_group()
        await_others(rank)
        return None
    handled: list[bool] = []

    def handler(*_: Any) -> None:
        store.set("handled", "1")
        dist.destroy_process_group()
        handled.append(True)

    error = ""
    with handling(handler):
        try:
            training.wait(what)
        except Exception as raised:  # judged by the test
            error = f"{type(raised).__name__}: {raised}"
    del training
    gc.collect()
    return handled, error


# Each backend by itself: who ends the group alone may wait for seconds.
@pytest.mark.parametrize(
    ("backend", "waits"),
    slow_on(
        [*((name, SYNCHRONIZED) for name in ("prague", "dssync", "hop")), ("dear", ("training", "forward"))], "dssync"
    ),
)
def test_a_handler_may_end_the_group(backend: str, waits: Sequence[str]) -> None:
    rows = {
        f"{what}, {'together' if together else 'alone'}": (backend, what, together)
        for what in waits
        for together in (False, True)
    }
    for row, values in row_values(body_end, 2, rows).items():
        handled, error = values[0]
        assert handled == [True], (row, values)
        # Together both have had what they waited for, if the other has given it on its way out.
        together = rows[row][2]
        assert error.startswith("DistBackendError: ") or (together and not error), (row, error)
