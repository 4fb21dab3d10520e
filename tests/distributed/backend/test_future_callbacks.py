"""Callbacks of a collective's future may make further collectives and wait for them, as torch's PowerSGD hook does.

No thread that those need runs a callback. So that callbacks do run on other threads than the script's, a rank adds them
before its peer comes to the call.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import new_group
from case_choice import quick_on
from harness import Rank, launch, run_ranks
from rows import row_values
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from torchext.backends import backend_of

pytestmark = pytest.mark.sanitize

WAITING = 8  # more than Gloo has threads


class Flags:
    """One rank tells the other how far it is, by files: no collective."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.number = rank, 0

    def first_then_second(self, call: Callable[[], Any]) -> Any:
        """`call` on rank 0, and on rank 1 when it has returned there."""
        self.number += 1
        flag = self.rank.folder / f"called{self.number}"
        if self.rank.rank == 0:
            result = call()
            flag.touch()
            return result
        while not flag.exists():
            time.sleep(0.002)
        return call()


def nested(kind: str, group: dist.ProcessGroup | None, _: Any) -> torch.Tensor:
    """The second collective, as callbacks make it."""
    tensor = torch.full((50,), 3.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if kind == "wait":
        work.wait()
        return tensor
    future = work.get_future()
    return future.wait()[0] if kind == "future" else future.then(lambda done: done.value()[0]).wait()


def callbacks(flags: Flags, kind: str, group: dist.ProcessGroup | None, count: int) -> None:
    def begin() -> tuple[list[torch.Tensor], list[Any]]:
        tensors = [torch.full((10 + count,), float(i + 1)) for i in range(count)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        return tensors, [work.get_future().then(partial(nested, kind, group)) for work in works]

    tensors, futures = flags.first_then_second(begin)
    for i, (tensor, future) in enumerate(zip(tensors, futures, strict=True)):
        assert torch.equal(future.wait(), torch.full((50,), 6.0)), kind
        assert torch.equal(tensor, torch.full_like(tensor, 2.0 * (i + 1))), kind


def body_callbacks(rank: Rank, backend: str) -> bool:
    rank.init(backend)
    flags = Flags(rank)
    for check in ("new", "off", "every"):
        group = new_group(backend, call_check=check)
        for kind in ("future", "wait", "chain"):
            for count in (1, WAITING, WAITING):
                callbacks(flags, kind, group, count)
    dist.destroy_process_group()
    return True


def body_partial(rank: Rank) -> bool:
    rank.init("prague")
    group, flags = backend_of(), Flags(rank)

    def inner(_: Any) -> torch.Tensor:
        # Callbacks that wait at the same time may call in another order on another rank: all exchange the same values.
        for _ in range(2):
            tensor = torch.full((5,), float(rank.rank))
            future = group.partial_all_reduce(tensor, [0, 1]).get_future()
            mean = future.then(lambda done: done.value()[0]).wait()
        return mean

    for _ in range(3):
        tensors = [torch.full((3,), float(rank.rank)) for _ in range(WAITING)]

        def begin(tensors: list[torch.Tensor] = tensors) -> list[Any]:
            works = [group.partial_all_reduce(tensor, [0, 1]) for tensor in tensors]
            return [work.get_future().then(inner) for work in works]

        for future in flags.first_then_second(begin):
            assert torch.equal(future.wait(), torch.full((5,), 0.5))
        assert all(torch.equal(tensor, torch.full((3,), 0.5)) for tensor in tensors)
    dist.destroy_process_group()
    return True


def body_callbacks_that_wait_for_others(rank: Rank, backend: str) -> bool:
    """Each callback waits for the call after its own, whose end stands behind it."""
    rank.init(backend)
    flags = Flags(rank)

    def begin() -> list[Any]:
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(WAITING)]
        futures = [work.get_future() for work in works]
        return [future.then(lambda _, after=after: after.wait()[0]) for future, after in itertools.pairwise(futures)]

    for future in flags.first_then_second(begin):
        assert torch.equal(future.wait(), torch.full((4,), 2.0))
    dist.destroy_process_group()
    return True


def power_sgd(rank: Rank, backend: str) -> list[torch.Tensor]:
    """Parameters after some steps with torch's hook, which waits for collectives in callbacks."""
    rank.init(backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(
        PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5),
        powerSGD_hook,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank.rank)
    for _ in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(6, 12, generator=data)).square().sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def with_gloo() -> list[torch.Tensor]:
    # With plain Gloo a process ends now and then where callbacks make collectives.
    for _ in range(5):
        with launch(power_sgd, 2, "gloo") as ranks:
            outcomes = ranks.outcomes()
        if all(outcome.ok for outcome in outcomes):
            break
    parameters: list[torch.Tensor] = outcomes[0].value
    return parameters


@pytest.mark.parametrize("backend", quick_on("prague"))
def test_power_sgd(backend: str, with_gloo: list[torch.Tensor]) -> None:
    """The same as with Gloo itself: two ranks add up the same numbers in either order."""
    for parameters in run_ranks(power_sgd, 2, backend):
        for got, expected in zip(parameters, with_gloo, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def callback_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it has ended meanwhile
            continue
    return names.count("tx_callbacks")


def body_many_futures(rank: Rank) -> bool:
    """Threads for callbacks are few and end with the group; each callback runs once."""
    rank.init("prague")
    ran: list[int] = []
    dist.all_reduce(torch.ones(3))
    assert callback_threads() == 0  # nobody has asked for them
    for _ in range(5):
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(100)]
        futures = [work.get_future().then(lambda _, i=i: ran.append(i)) for i, work in enumerate(works)]
        torch.futures.wait_all(futures)
    assert callback_threads() <= 50
    dist.destroy_process_group()
    return len(ran) == 500


def body_slow_callback(rank: Rank) -> bool:
    """To destroy the group waits for its callbacks."""
    rank.init("dssync")
    done: list[str] = []

    def slow(_: Any) -> None:
        time.sleep(0.2)
        done.append(threading.current_thread().name)

    flags = Flags(rank)
    flags.first_then_second(lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().then(slow))
    dist.destroy_process_group()
    return len(done) == 1 and callback_threads() == 0


def body_callback_that_destroys(rank: Rank, backend: str) -> bool:
    rank.init(backend)
    flags = Flags(rank)

    def begin() -> Any:
        return dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: dist.destroy_process_group())

    flags.first_then_second(begin).wait()
    return not dist.is_initialized()


def begin_owned(group: dist.ProcessGroup) -> None:
    """A call whose callback is the group's last owner: it takes longer than the end of the group waits for it."""

    def callback(_: Any, __: dist.ProcessGroup = group) -> None:
        time.sleep(0.7)

    dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(callback)


def body_callback_that_owns(rank: Rank, backend: str) -> bool:
    rank.init(backend)
    flags = Flags(rank)
    for _ in range(2):
        group = new_group(backend)
        flags.first_then_second(partial(begin_owned, group))
        dist.destroy_process_group(group)
        owned = weakref.ref(group)
        del group
        while owned() is not None:
            time.sleep(0.01)
    dist.destroy_process_group()
    return True


def body_of(rank: Rank, body: Callable[..., bool], *arguments: Any) -> bool:
    return body(rank, *arguments)


@pytest.mark.parametrize("backend", quick_on("prague"))
def test_callbacks(backend: str) -> None:
    """They make collectives and wait, destroy the group, or are its last owner.

    With plain Gloo the thread that runs a last owner joins itself, and the process is ended.
    """
    rows: dict[str, tuple[Any, ...]] = {
        "make collectives": (body_callbacks, backend),
        "destroys the group": (body_callback_that_destroys, backend),
        "is the last owner": (body_callback_that_owns, backend),
    }
    assert row_values(body_of, 2, rows) == {name: [True, True] for name in rows}


def test_callbacks_of_what_one_backend_adds_and_of_all_share() -> None:
    rows: dict[str, tuple[Any, ...]] = {
        "make partial all-reduces": (body_partial,),
        "wait for calls behind theirs": (body_callbacks_that_wait_for_others, "hop"),
        "are many": (body_many_futures,),
        "are slow": (body_slow_callback,),
    }
    assert row_values(body_of, 2, rows) == {name: [True, True] for name in rows}


def body_sessions(rank: Rank, backend: str) -> tuple[int, list[Any]]:
    """Groups come and go in one process, right behind backward passes whose hooks have callbacks."""
    found: list[Any] = []
    for session in range(20):
        rank.init(backend, store=f"store{session}")
        torch.manual_seed(session)
        model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 4))
        inputs = torch.rand(2, 6, 12)
        model(inputs).square().sum().div(2).backward()
        expected = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        ddp = DistributedDataParallel(model)
        if session % 2:
            ddp.register_comm_hook(None, bf16_compress_hook)
        else:
            ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook)
        for step in range(4):
            ddp(inputs[rank.rank]).square().sum().backward()
            if step == 0:  # PowerSGD does not compress yet
                for parameter, gradient in zip(model.parameters(), expected, strict=True):
                    torch.testing.assert_close(parameter.grad, gradient, rtol=0.02, atol=0.02)
        dist.destroy_process_group()
        found += [parameter.grad for parameter in model.parameters()]
    return callback_threads(), found


def test_sessions_with_hooks_one_after_the_other() -> None:
    rows = {backend: (backend,) for backend in ("dear", "prague")}
    found = row_values(body_sessions, 2, rows, deadline=120)
    expected = found["prague"][0][1]
    for backend, values in found.items():
        for threads, gradients in values:
            assert threads == 0, backend
            torch.testing.assert_close(gradients, expected, msg=backend)


def body_callback_of_a_failed_call(rank: Rank) -> list[str]:
    """It makes another call, which raises at once: the group's threads are not the callback's."""
    rank.init("prague")
    dist.barrier()
    if rank.rank == 1:
        rank.pause()
        return []
    errors: list[str] = []

    def then(future: Any) -> None:
        for call in (future.value, lambda: dist.all_reduce(torch.ones(2))):
            try:
                call()
            except Exception as error:  # judged by the test
                errors.append(f"{type(error).__name__}: {error}")

    futures = [dist.all_reduce(torch.ones(5), async_op=True).get_future().then(then) for _ in range(3)]
    dist.distributed_c10d._get_default_group().abort()
    torch.futures.wait_all(futures)
    dist.destroy_process_group()
    return errors


def test_callbacks_of_failed_calls() -> None:
    with launch(body_callback_of_a_failed_call, 2) as ranks:
        outcome = ranks.outcomes([0])[0]
        ranks.proceed([1])
    assert outcome.ok, outcome.trace
    assert len(outcome.value) == 6
    assert all("rank 0 called abort()" in text for text in outcome.value), outcome.value
