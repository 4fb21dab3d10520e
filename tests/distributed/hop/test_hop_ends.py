"""Workers of hop that end before the others, are interrupted, or hear of a neighbour only by its models."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from attached import Trainer, equal_everywhere
from harness import Rank, run_ranks
from hop_reference import ORDERS
from rows import row

import torchext

pytestmark = pytest.mark.sanitize


def steps_until_destroyed(rank: Rank, order: str) -> int:
    rank.init("hop", store=order, timeout=20, pg_options=torchext.HopOptions(order=order))
    trainer = Trainer(rank, group=dist.group.WORLD)
    trainer.run(3)
    if rank.rank == 3:
        dist.destroy_process_group()
        return trainer.step_count
    end = time.monotonic() + (3 if rank.rank == 2 else 4)  # longer than what a process that exits is waited for
    while time.monotonic() < end:
        trainer.step()
        time.sleep(0.01)
    if rank.rank == 2:
        trainer.sync.detach()
    dist.destroy_process_group()
    return trainer.step_count


def body_destroys_early(rank: Rank) -> dict[str, int]:
    found = {}
    for order in ORDERS:
        with row(order):
            found[order] = steps_until_destroyed(rank, order)
    return found


def test_who_destroys_its_group_early_ends_nobody() -> None:
    of_ranks = run_ranks(body_destroys_early, 4, deadline=60)
    for order in ORDERS:
        steps = [found[order] for found in of_ranks]
        assert steps[3] == 3 and min(steps[:3]) > 20, (order, steps)


class Interrupt(Exception):
    pass


# Each waits for something else: a token in both orders, with stale models or without, an acknowledgement, a jump's end.
WAITS: list[dict[str, Any]] = [
    {"max_iteration_gap": 1},
    {"max_iteration_gap": 1, "staleness": 3},
    {"max_iteration_gap": 1, "order": "serial"},
    {"notify_ack": True},
    {"max_iteration_gap": 2, "backup_workers": 1, "max_jump": 4},
]


def interruptions(rank: Rank, options: dict[str, Any]) -> int:
    trainer = Trainer(rank, backend="hop", graph="ring", lr=0.02, **options)
    interrupted = 0
    if rank.rank == 0:  # the others are slow, so that it waits for a token or an acknowledgement in most steps

        def handler(_: int, frame: Any) -> None:
            if frame.f_code.co_name in (
                "<lambda>",
                "_before",
            ):  # around a call of the synchronizer: not inside of torch's own
                raise Interrupt

        signal.signal(signal.SIGUSR1, handler)
        stop = threading.Event()

        def interrupts() -> None:
            while not stop.wait(0.13):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        thread = threading.Thread(target=interrupts)
        thread.start()
        end = time.monotonic() + 3
        try:
            while time.monotonic() < end:
                try:
                    trainer.step()
                except Interrupt:
                    interrupted += 1
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            stop.set()
            thread.join()
    else:
        for _ in range(18):
            time.sleep(0.15)
            trainer.step()
    trainer.sync.synchronize()
    equal_everywhere(trainer.module, trainer.group)
    trainer.run(5)
    trainer.sync.detach()
    return interrupted


def body_interrupted(rank: Rank) -> dict[str, int]:
    rank.init("hop", timeout=20)
    found = {}
    for options in WAITS:
        with row(options):
            found[str(options)] = interruptions(rank, options)
    return found


def test_training_goes_on_after_an_interrupted_wait() -> None:
    interrupted = run_ranks(body_interrupted, 3, deadline=120)[0]
    assert min(interrupted.values()) > 0, interrupted


def body_directed(rank: Rank) -> None:
    dist.set_debug_level(dist.DebugLevel.INFO)  # workers assert the bound on the gap in every iteration
    rank.init("hop", timeout=20)
    for order in ORDERS:
        with row(order):
            trainer = Trainer(
                rank, backend="hop", neighbours=[[1], [2], [0]], order=order, staleness=4, max_iteration_gap=1, lr=0.02
            )
            for _ in range(40):
                time.sleep(0.05 if rank.rank == 0 else 0.001)
                trainer.step()
            stats = trainer.sync.stats()
            trainer.sync.detach()
            assert max(stats["gaps"]) <= stats["gap_bound"], stats


def test_a_neighbour_that_owns_no_tokens_is_known_by_its_models() -> None:
    run_ranks(body_directed, 3)
