"""What ends K-FAC's waits, through memory and through sockets: signals, and the failure of the model's group."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere
from harness import Rank, elapsed_error, launch
from kfac_net import OPTIONS, Net, train, whole_batch
from rows import row
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.optim import KFAC, KFACPreconditioner

pytestmark = pytest.mark.sanitize

# Of every wait; what is waited for here takes far less.
TIMEOUT = 300.0

# tests/cpp/kfac ends the waits of each part in either way.
through_memory = pytest.mark.parametrize(
    "shared", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["memory", "sockets"]
)
through_sockets = pytest.mark.parametrize(
    "shared", [pytest.param(True, marks=pytest.mark.slow), False], ids=["memory", "sockets"]
)


@contextlib.contextmanager
def on_alarm(handler: Callable[..., None], seconds: float = 1.0) -> Iterator[None]:
    """A signal when what stands inside has come to its wait."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Stop(Exception):
    pass


def backward(model: nn.Module, optimizer: Any, step: int, rank: Rank) -> None:
    image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(image, token), target).backward()


def body_signal(rank: Rank, strategy: str, shared: bool, interval: int, raises: bool) -> Any:
    """Rank 1 comes to the step only when rank 0's handler has run."""
    model = DistributedDataParallel(Net())
    options = OPTIONS | {"inverse_update_steps": interval}
    optimizer = KFAC(model, strategy=strategy, shared_memory=shared, **options)
    train(model, optimizer, 2, rank=rank.rank, size=rank.size)

    def handler(*_: Any) -> None:
        rank.report(f"handled {strategy}")
        if raises:
            raise Stop

    backward(model, optimizer, 2, rank)
    if rank.rank == 1:
        rank.pause()
        # What rank 0 had sent of the first step may be all that is needed of it.
        return (
            elapsed_error(lambda: (optimizer.step(), optimizer.step()))[:2]
            if raises
            else train_on(rank, model, optimizer)
        )
    with on_alarm(handler):
        if not raises:
            return train_on(rank, model, optimizer)
        with pytest.raises(Stop):
            optimizer.step()
    rank.report(f"raised {strategy}")
    return elapsed_error(optimizer.step)[:2]


def body_signals(rank: Rank, ways: list[tuple[str, bool, int]], raises: bool) -> list[Any]:
    """One way after the other, each with an optimizer, and so an exchange, of its own."""
    rank.init("gloo", timeout=TIMEOUT)
    found = []
    for way in ways:
        with row(way):
            found.append(body_signal(rank, *way, raises))
    return found


def train_on(rank: Rank, model: nn.Module, optimizer: KFAC) -> None:
    optimizer.step()
    train(model, optimizer, 3, first=3, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)  # type: ignore[arg-type]


# What rank 0 waits for: votes on the step, another's directions. Waits for factors and inverses end likewise: tests/cpp
# has those of all parts.
WAITS = [("pad", 1), ("mem-opt", 100)]


def test_a_handler_runs_while_a_step_waits_through_sockets() -> None:
    with launch(body_signals, 2, [(strategy, False, interval) for strategy, interval in WAITS], False) as ranks:
        for strategy, _ in WAITS:
            ranks.expect(f"handled {strategy}", [0], deadline=30)
            ranks.proceed([1])
        ranks.values()


def test_what_a_handler_raises_ends_the_step_on_all_ranks() -> None:
    ways = [(strategy, shared, interval) for (strategy, interval), shared in zip(WAITS, (False, True), strict=True)]
    with launch(body_signals, 2, ways, True) as ranks:
        for strategy, *_ in ways:
            ranks.expect(f"raised {strategy}", [0], deadline=30)
            ranks.proceed([1])
        values = ranks.values(deadline=20)
    for way, own, other in zip(ways, *values, strict=True):
        assert own[0] == "DistBackendError" and "an earlier exchange was interrupted" in own[1], (way, own)
        assert other[0] == "DistBackendError", (way, other)
        says = ("rank 0 was interrupted", "K-FAC's exchange with rank 0 failed")
        assert any(text in other[1] for text in says), (way, other)


def options_of(backend: str) -> Any:
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "prague": (torchext.PragueOptions, {}),
        "hop": (torchext.HopOptions, {}),
        "dssync": (torchext.DSSyncOptions, {}),
        "dear": (torchext.DeAROptions, {"form": "replicated"}),
    }
    kind, more = kinds[backend]
    return kind(heartbeat_timeout=timedelta(seconds=1.5), timeout=timedelta(seconds=TIMEOUT), **more)


def body_failure(rank: Rank, backend: str, shared: bool, interval: int, how: str) -> Any:
    """Rank 1 does not come to the step; the model's group fails meanwhile."""
    rank.init(backend, timeout=TIMEOUT, pg_options=options_of(backend))
    model = Net()
    kfac = KFACPreconditioner(model, strategy="mem-opt", inverse_update_steps=interval, shared_memory=shared)
    for step in range(3):
        model.zero_grad()
        image, token, target = whole_batch(step)  # the same on all ranks: so are gradients, without an average
        nn.functional.cross_entropy(model(image, token), target).backward()
        if step == 2 and rank.rank == 1:
            rank.report("away")
            rank.pause()  # until the other has ended the steps before
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            torchext.backend_of().abort_with_reason("rank 1 has had enough")
            rank.pause()
            return None
        if step < 2:
            kfac.step(lr=0.1)
    rank.report("coming")
    first = elapsed_error(lambda: kfac.step(lr=0.1))
    again = elapsed_error(lambda: kfac.step(lr=0.1))
    rank.report("done")
    return first, again, torchext.backend_of().failure


# Its failure comes by a callback of DelegatingBackend, of which all backends are.
@pytest.mark.parametrize(
    ("backend", "shared", "interval"),
    [
        ("prague", False, 1),
        ("dear", True, 100),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("prague", True, 100),
                ("hop", True, 1),
                ("dssync", False, 100),
                ("dear", True, 1),
                ("dear", False, 1),
            )
        ),
    ],
)
def test_a_step_ends_with_the_models_group(backend: str, shared: bool, interval: int) -> None:
    with launch(body_failure, 2, backend, shared, interval, "aborts") as ranks:
        ranks.expect("away", [1])
        ranks.expect("coming", [0])
        ranks.proceed([1])
        ranks.expect("done", [0], deadline=20)
        ranks.proceed([1])
        first, again, failure = ranks.values()[0]
    for kind, text, _ in (first, again):
        assert kind == "DistBackendError" and "rank 1 has had enough" in text, text
    assert "rank 1 has had enough" in failure[1]


@through_memory
def test_a_step_ends_where_a_rank_is_stopped(shared: bool) -> None:
    with launch(body_failure, 2, "dear", shared, 1, "stops") as ranks:
        ranks.expect("coming", [0])
        ranks.proceed([1])
        ranks.expect_stopped(1)
        outcome = ranks.outcomes([0], deadline=30)[0]
        ranks.kill(1)
    assert outcome.ok, outcome.trace
    first, again, failure = outcome.value
    for kind, text, _ in (first, again):
        assert kind == "DistBackendError" and failure[1] in text, text
    assert failure[0] == 1


def body_destroys(rank: Rank, shared: bool) -> Any:
    """A handler ends all groups, as before an exit, while the step waits for rank 1."""
    rank.init("dear", timeout=TIMEOUT, pg_options=options_of("dear"))
    model = Net()
    kfac = KFACPreconditioner(model, strategy="mem-opt", inverse_update_steps=1, shared_memory=shared)
    image, token, target = whole_batch(0)
    nn.functional.cross_entropy(model(image, token), target).backward()
    if rank.rank == 1:
        rank.pause()
        return None
    with on_alarm(lambda *_: dist.destroy_process_group()):
        return elapsed_error(lambda: kfac.step(lr=0.1))


@through_sockets
def test_a_handler_may_end_the_groups(shared: bool) -> None:
    with launch(body_destroys, 2, shared) as ranks:
        outcome = ranks.outcomes([0], deadline=30)[0]
        ranks.proceed([1])
    assert outcome.ok, outcome.trace
    kind, text, _ = outcome.value
    assert kind == "DistBackendError" and "destroy_process_group" in text, text


def body_away_at_the_start(rank: Rank, backend: str) -> Any:
    """Rank 1 does not make its optimizer."""
    rank.init(backend, timeout=TIMEOUT, pg_options=None if backend == "gloo" else options_of(backend))
    handled = []
    if rank.rank == 1:
        dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))  # K-FAC's: connecting waits in torch
        rank.pause()
        if backend != "gloo":
            torchext.backend_of().abort_with_reason("rank 1 has had enough")
        rank.pause()
        return None

    def handler(*_: Any) -> None:
        handled.append(True)
        rank.report("handled")
        if backend == "gloo":
            raise Stop

    with on_alarm(handler):
        try:
            KFACPreconditioner(Net())
        except (Stop, dist.DistBackendError) as error:
            rank.report("done")
            time.sleep(0.3)  # the last to let go of what the error holds is this thread
            return type(error).__name__, str(error), handled
    return None


@pytest.mark.parametrize("backend", ["gloo", "prague"])
def test_the_start_ends_likewise(backend: str) -> None:
    with launch(body_away_at_the_start, 2, backend) as ranks:
        ranks.expect("handled", [0], deadline=30)
        ranks.proceed([1])
        ranks.expect("done", [0], deadline=15)
        ranks.proceed([1])
        kind, text, handled = ranks.values()[0]
    assert handled == [True]
    assert kind == ("Stop" if backend == "gloo" else "DistBackendError")
    assert backend == "gloo" or "rank 1 has had enough" in text


def body_default_device(rank: Rank) -> None:
    rank.init("gloo")
    torch.set_default_device("meta")
    model = DistributedDataParallel(Net().to_empty(device="cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    optimizer = KFAC(model, **OPTIONS)
    torch.set_default_device("cpu")
    batches = [whole_batch(step) for step in range(4)]
    torch.set_default_device("meta")
    for image, token, target in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, token), target).backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    torch.set_default_device("cpu")
    assert optimizer.stats()["steps"] == 4
    equal_everywhere(model.module)


def test_a_default_device_is_not_where_ranks_agree() -> None:
    with launch(body_default_device, 2) as ranks:
        ranks.values()
