"""K-FAC's waits through memory: signals, other threads, exceptions, ranks that make different calls."""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank, elapsed_error, launch, run_ranks
from kfac_net import OPTIONS, Net, train, whole_batch
from rows import values_in_one_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torchext.optim import KFAC

pytestmark = pytest.mark.sanitize


def trained(rank: Rank, timeout: float, steps: int = 2, **options: Any) -> tuple[nn.Module, KFAC]:
    if not dist.is_initialized():
        rank.init("gloo", timeout=timeout)
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, **(OPTIONS | {"strategy": "mem-opt"} | options))
    train(model, optimizer, steps, rank=rank.rank, size=rank.size)
    return model, optimizer


@contextlib.contextmanager
def alarm(handler: Callable[..., None], seconds: float = 0.5) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def body_handler(rank: Rank) -> Any:
    model, optimizer = trained(rank, 30)
    found: list[Any] = []

    def handler(*_: Any) -> None:
        found.append(optimizer.stats()["steps"])
        optimizer.kfac.kl_clip = 0.5
        for call in (optimizer.step, optimizer.state_dict, optimizer.kfac.discard):
            found.append(elapsed_error(call)[:2])

    if rank.rank == 0:
        with alarm(handler):
            optimizer.step()
    else:
        time.sleep(1.2)
        optimizer.step()
    optimizer.kfac.kl_clip = 0.5
    train(model, optimizer, 3, first=3, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    return found


def test_a_handler_may_look_and_not_step() -> None:
    """It runs on the thread that waits, and holds the engine's lock."""
    (steps, *refused), nothing = run_ranks(body_handler, 2)
    assert steps == 2 and nothing == []
    for name, (kind, text) in zip(("step", "state_dict", "discard"), refused, strict=True):
        assert kind == "RuntimeError"
        assert f"{name}() was called by a signal's handler while step() waits for another rank" in text


def body_thread(rank: Rank) -> float:
    """A schedule on another thread sets damping while the main one waits."""
    _, optimizer = trained(rank, 30)

    def schedule() -> None:
        time.sleep(0.5)
        optimizer.kfac.damping = 0.02

    thread = threading.Thread(target=schedule, daemon=True)
    thread.start()
    if rank.rank == 1:
        time.sleep(1.2)
    optimizer.step()
    thread.join(10)
    return optimizer.kfac.damping


def test_another_thread_may_set_options_meanwhile() -> None:
    assert run_ranks(body_thread, 2) == [0.02, 0.02]


class Stop(Exception):
    pass


def body_raises(rank: Rank) -> Any:
    """Rank 1 is interrupted and lives on; rank 0 comes late to that step, and to the next."""
    _, optimizer = trained(rank, 60, inverse_update_steps=100)

    def handler(*_: Any) -> None:
        raise Stop

    if rank.rank == 1:
        with alarm(handler), pytest.raises(Stop):
            optimizer.step()
        rank.report("raised")
        again = elapsed_error(optimizer.step)
        rank.pause()
        return again
    time.sleep(1.5)
    optimizer.step()  # rank 1's part of it was written before
    return elapsed_error(optimizer.step)


def test_who_was_interrupted_is_named_at_once() -> None:
    with launch(body_raises, 2) as ranks:
        outcome = ranks.outcomes([0])[0]
        ranks.proceed([1])
        other = ranks.outcomes([1])[0]
    assert outcome.ok and other.ok, (outcome.trace, other.trace)
    kind, text, seconds = outcome.value
    assert kind == "DistBackendError" and seconds < 5, outcome.value
    assert "rank 1 was interrupted while rank 0 waited" in text
    assert other.value[0] == "DistBackendError" and "an earlier exchange was interrupted" in other.value[1]


def body_other_step(rank: Rank) -> Any:
    """K-FAC's state is loaded on rank 0 alone: it gathers directions where rank 1 sends factors."""
    _, first = trained(rank, 20, steps=1)
    state = copy.deepcopy(first.state_dict())
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="mem-opt", **OPTIONS)
    if rank.rank == 0:
        optimizer.load_state_dict(state)
    before = flat(model.module)
    image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(1))
    nn.functional.cross_entropy(model(image, token), target).backward()
    return elapsed_error(optimizer.step), torch.equal(before, flat(model.module))


def test_ranks_at_different_steps_read_nothing_of_each_other() -> None:
    for (kind, text, seconds), unchanged in run_ranks(body_other_step, 2):
        assert kind == "DistBackendError" and unchanged and seconds < 5, (text, seconds)
        assert "make different exchanges" in text or "was interrupted" in text, text


class Fails(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "linalg_eigh" in str(func):
            raise MemoryError("no memory")
        return func(*args, **(kwargs or {}))


def fails_once(model: nn.Module, optimizer: KFAC, rank: int, size: int) -> str:
    said = ""
    for step in range(2, 7):
        image, token, target = (part.chunk(size)[rank] for part in whole_batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, token), target).backward()
        try:
            with Fails() if step == 3 else contextlib.nullcontext():
                optimizer.step()
        except MemoryError as error:
            said = f"{step}: {error}"
    return said


def body_again(rank: Rank, shared: bool) -> tuple[str, float]:
    """An inversion throws on all ranks, which go on as one process with the whole batch does after the same."""
    options = {"method": "eigen", "inverse_update_steps": 1}
    model, optimizer = trained(rank, 30, strategy="d-kfac", shared_memory=shared, **options)
    said = fails_once(model, optimizer, rank.rank, rank.size)
    equal_everywhere(model.module)
    groups = [dist.new_group([r]) for r in range(rank.size)]
    alone = Net()
    reference = KFAC(alone, process_group=groups[rank.rank], **(OPTIONS | options))
    train(alone, reference, 2)
    assert fails_once(alone, reference, 0, 1) == said
    return said, float((flat(model.module) - flat(alone)).abs().max() / flat(alone).abs().max())


def test_a_step_that_failed_everywhere_leaves_ranks_equal() -> None:
    cases = {"memory": (body_again, True), "sockets": (body_again, False)}
    for way, found in values_in_one_group(cases, 2, timeout=30).items():
        for said, error in found:
            assert said == "3: no memory" and error < 1e-9, (way, said, error)


def body_late(rank: Rank) -> None:
    """Rank 1 is late while rank 0 has no descriptor left to look after it with."""
    _, optimizer = trained(rank, 30)
    if rank.rank == 1:
        time.sleep(1.5)
        optimizer.step()
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    optimizer.step()
    for descriptor in taken:
        os.close(descriptor)


def test_who_is_late_has_not_died() -> None:
    run_ranks(body_late, 2)
