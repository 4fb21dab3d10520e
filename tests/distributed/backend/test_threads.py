"""Other threads beside the one that trains, and Python's garbage collector, which runs when it likes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import Trainer, batch, equal_everywhere, mlp, new_group
from harness import Rank, run_ranks
from largest import largest
from rows import Rows, row_values
from torch import nn

pytestmark = pytest.mark.sanitize

# dssync trains in prague's class: its rows are slow.
_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "prague, cta": ("prague", {"order": "cta"}),
    "prague, atc": ("prague", {"order": "atc"}),
    "hop": ("hop", {}),
}
each_backend = pytest.mark.parametrize(
    "rows",
    [
        pytest.param(_ROWS, id="quick"),
        pytest.param({"dssync": ("dssync", {})}, id="dssync", marks=pytest.mark.slow),
    ],
)


def together(*bodies: Callable[[], None]) -> None:
    """Runs each in a thread of its own; raises the first error of any."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "two threads wait for each other"


def body_collectives_beside_training(rank: Rank, backend: str, options: dict[str, Any]) -> tuple[float, int]:
    """A thread that logs over a group of its own, say. Nothing learns: parameters must stay where all of them are."""
    rank.init(backend, timeout=20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 500), nn.Tanh(), nn.Linear(500, 1))
    trainer = Trainer(rank, model=model, lr=0.0, backend=backend, **options)
    side = new_group(backend)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    moved = 0.0

    def train() -> None:
        nonlocal moved
        for step in range(80):
            trainer.step()
            trainer.sync.wait()
            if rank.rank == 0 and step % 7 == 0:
                time.sleep(0.003)
            pairs = zip(before, model.parameters(), strict=True)
            moved = largest(moved, *(float((old - new.detach()).abs().max()) for old, new in pairs))

    def log() -> None:
        for _ in range(60):
            total = torch.ones(1)
            dist.all_reduce(total, group=side)
            assert float(total) == 3.0

    together(train, log)
    trainer.sync.synchronize()
    averages = trainer.sync.stats()["averages"]
    trainer.sync.detach()
    return moved, averages


@each_backend
def test_collectives_of_another_thread(rows: Rows) -> None:
    for row, found in row_values(body_collectives_beside_training, 3, rows).items():
        for moved, averages in found:
            assert moved < 1e-5 and averages > 0, (row, found)


def body_a_thread_each(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    """An ensemble: every model in a group of its own, trained by a thread of its own."""
    rank.init(backend, timeout=20)
    trainers = [Trainer(rank, backend=backend, **options) for _ in range(2)]

    def train(trainer: Trainer) -> None:
        for step in range(40):
            trainer.step()
            if rank.rank == 0 and step % 9 == 0:
                time.sleep(0.12)  # longer than a model waits before the others drain theirs
        trainer.sync.synchronize()

    together(*(lambda trainer=trainer: train(trainer) for trainer in trainers))  # type: ignore[misc]
    for trainer in trainers:
        assert trainer.sync.stats()["averages"] > 0
        equal_everywhere(trainer.module)
        trainer.sync.detach()


@each_backend
def test_models_of_different_threads(rows: Rows) -> None:
    row_values(body_a_thread_each, 2, rows)


def body_forgotten(rank: Rank, backend: str, options: dict[str, Any]) -> list[float]:
    """Trials in a loop, in one group; nobody detaches, and one rank collects its garbage at once."""
    rank.init(backend, timeout=20)
    group, losses = new_group(backend, **options), []
    for _ in range(3):
        trainer = Trainer(rank, group=group)
        trainer.run(10)
        losses.append(trainer.evaluate())
        assert trainer.sync.stats()["averages"] > 0
        del trainer
        if rank.rank == 1:
            gc.collect()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert float(total) == 2.0
    dist.destroy_process_group()
    return losses


@each_backend
def test_models_that_are_forgotten_leave_their_group_alone(rows: Rows) -> None:
    inputs, targets = batch(77, 0, rows=256)
    untrained = float(nn.functional.mse_loss(mlp()(inputs), targets).detach())
    for row, (first, second) in row_values(body_forgotten, 2, rows).items():
        assert first == second, row
        assert all(loss < untrained for loss in first), (row, first)


def body_inference(rank: Rank) -> None:
    """What waits to be applied after a collective in inference mode is applied outside of it."""
    rank.init()
    trainer = Trainer(rank)
    for _ in range(12):
        trainer.step()
        with torch.inference_mode():
            dist.all_reduce(torch.ones(1))
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-1, 1)
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()


def test_collectives_in_inference_mode() -> None:
    run_ranks(body_inference, 2)


def body_unused(rank: Rank) -> int:
    """DDP looks for unused parameters in each step; other workers have nothing to do with it."""
    rank.init()
    trainer = Trainer(rank, ddp={"find_unused_parameters": True})
    trainer.run(9 if rank.rank == 1 else 27)
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()
    return trainer.step_count


def test_workers_look_for_unused_parameters_by_themselves() -> None:
    assert run_ranks(body_unused, 3) == [27, 9, 27]


def body_leaves_twice(rank: Rank, backend: str) -> bool:
    """The script ends on one thread while another destroys the groups, for which it waits for the other rank."""
    rank.init(backend, timeout=20)
    trainer = Trainer(rank, backend=backend)
    trainer.run(3)

    def end() -> None:
        time.sleep(0.3)
        trainer.sync._leave_at_exit()

    if rank.rank == 0:
        together(dist.destroy_process_group, end)
    else:
        time.sleep(4)
        dist.destroy_process_group()
    return not dist.is_initialized()


@each_backend
def test_the_script_ends_while_its_groups_are_destroyed(rows: Rows) -> None:
    backends = {backend: (backend,) for backend, _ in rows.values()}
    found = row_values(body_leaves_twice, 2, backends)
    assert found == {backend: [True, True] for backend in backends}
