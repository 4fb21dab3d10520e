"""A peer sends what no torchext sends: the group ends on all ranks at once, and all of them name it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import Trainer
from harness import Rank, elapsed_error, launch
from rows import row_values

import torchext
from torchext import _C

pytestmark = pytest.mark.sanitize

# Those of csrc/c10d: of a group's first attached model, of the comparison of calls.
FIRST_MODEL = 0x40000008
TO_SERVICE, TO_WORKER = FIRST_MODEL, FIRST_MODEL + 1
AGREEMENT = 0x7FFF0002

GARBAGE = {
    "short": torch.full((5,), 0xFF, dtype=torch.uint8),
    "zeros": torch.zeros(24, dtype=torch.uint8),  # as long as a message to the generator
}


_PLAIN = _C.InnerBackends


def note_controls() -> list[Any]:
    """The control groups of the groups that this process makes from now on."""
    made: list[Any] = []

    def noting(*, control: Any, **others: Any) -> Any:
        made.append(control)
        return _PLAIN(control=control, **others)

    _C.InnerBackends = noting  # type: ignore[assignment, misc]
    return made


Calls = tuple[dist.ProcessGroup | None, Callable[[], Any]]


def in_training(rank: Rank, controls: list[Any], garbage: torch.Tensor, sender: int, to: int, tag: int) -> Calls:
    trainer = Trainer(rank)
    dist.barrier()

    def call() -> None:
        if rank.rank == sender:
            controls[-1].send([garbage], to, tag).wait()
        trainer.run(1_000_000)

    return trainer.group, call


def to_service(rank: Rank, controls: list[Any], garbage: torch.Tensor) -> Calls:
    return in_training(rank, controls, garbage, sender=1, to=0, tag=TO_SERVICE)


def to_worker(rank: Rank, controls: list[Any], garbage: torch.Tensor) -> Calls:
    return in_training(rank, controls, garbage, sender=0, to=1, tag=TO_WORKER)


# name -> (what begins it, who sends it). In averages and in the comparison of calls: tests/cpp/c10d.
WHERE: dict[str, tuple[Callable[[Rank, list[Any], torch.Tensor], Calls], int]] = {
    "service": (to_service, 1),
    "worker": (to_worker, 0),
}


def body_malformed(rank: Rank, where: str, what: str) -> Any:
    controls = note_controls()
    rank.init(timeout=60)
    group, call = WHERE[where][0](rank, controls, GARBAGE[what])
    error = elapsed_error(call)
    later = elapsed_error(lambda: dist.all_reduce(torch.ones(1), group=group))
    return error, later, torchext.backend_of(group).failure


def test_a_malformed_message_ends_the_group_on_all_ranks() -> None:
    rows = {f"{what} to the {where}": (where, what) for where in WHERE for what in GARBAGE}
    for name, values in row_values(body_malformed, 3, rows, deadline=25).items():  # well before any timeout
        sender = WHERE[rows[name][0]][1]
        reasons = set()
        for error, later, failure in values:
            for kind, text, _ in (error, later):
                assert kind == "DistBackendError", (name, kind, text)
                assert f"rank {sender} sent a malformed message: malformed " in text, (name, text)
            assert error[2] < 15 and later[2] < 3, name  # usually well below one second
            assert failure[0] == sender, (name, failure)
            reasons.add(failure[1])
        assert len(reasons) == 1, (name, reasons)


def body_destroy_in_callback(rank: Rank) -> Any:
    """The thread that was to start the call finds out, and so calls the callback."""
    controls = note_controls()
    rank.init(timeout=60)
    if rank.rank == 1:
        rank.pause()
        controls[0].send([GARBAGE["short"]], 0, AGREEMENT).wait()
        return elapsed_error(lambda: dist.recv(torch.ones(1), 0))[1]
    controls.clear()
    destroyed = threading.Event()
    threads: list[int] = []

    def destroy(_future: Any) -> None:
        threads.append(threading.get_ident())
        dist.destroy_process_group()
        destroyed.set()

    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.get_future().add_done_callback(destroy)
    rank.report("called")
    assert destroyed.wait(20)
    text = elapsed_error(work.wait)[1]
    del work
    gc.collect()
    time.sleep(0.5)  # for what is left of that thread
    assert not dist.is_initialized() and threads != [threading.get_ident()]
    return text


def test_destroy_in_the_callback_of_a_call_that_has_not_started() -> None:
    with launch(body_destroy_in_callback, 2) as ranks:
        ranks.expect("called", [0])
        ranks.proceed([1])
        for text in ranks.values(deadline=40):
            assert "rank 1 sent a malformed message" in text, text
