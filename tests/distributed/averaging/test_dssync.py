"""Divide and shuffle, against replicas that one process trains and averages in the groups that the paper draws."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, batch, equal_everywhere, everywhere, flat, new_group
from harness import Rank, run_ranks
from largest import largest
from rows import row
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import torchext

pytestmark = pytest.mark.sanitize

# Sides of the grid for each number of ranks, the lowest coordinate first.
SIDES = {2: [2], 3: [3], 4: [2, 2], 6: [3, 2], 8: [2, 2, 2]}


def grid_groups(size: int, step: int) -> list[list[int]]:
    """Round t averages those that differ in coordinate t mod p only."""
    sides = SIDES[size]
    turn = step % len(sides)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(size):
        place, rest = [], rank
        for side in sides:
            place.append(rest % side)
            rest //= side
        groups.setdefault(tuple(place[:turn] + place[turn + 1 :]), []).append(rank)
    return list(groups.values())


def model() -> nn.Module:
    """Three averaging buckets of 1 KiB or more, and more of DDP's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups with momentum: state that stays with its worker."""
    first, *others = module.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": others}], lr=0.1, momentum=0.9)


class Replicas:
    """All workers in one process."""

    def __init__(self, size: int, order: str, period: int = 1) -> None:
        self.size, self.order, self.period = size, order, period
        self.modules = [model() for _ in range(size)]
        self.optimizers = [make_optimizer(module) for module in self.modules]
        self.pending: list[torch.Tensor] | None = None
        self.steps = 0

    def step(self) -> None:
        gradients = []
        for rank, module in enumerate(self.modules):
            inputs, targets = batch(rank, self.steps)
            loss = nn.functional.mse_loss(module(inputs), targets)
            gradients.append(torch.autograd.grad(loss, list(module.parameters())))
        if (
            self.pending is not None
        ):  # cta: the gradient is that of the local values, the step is taken from the average
            self.assign(self.pending)
            self.pending = None
        for module, optimizer, of_rank in zip(self.modules, self.optimizers, gradients, strict=True):
            for parameter, gradient in zip(module.parameters(), of_rank, strict=True):
                parameter.grad = gradient
            optimizer.step()
        self.steps += 1
        if self.steps % self.period == 0:
            averaged = self.averages(self.steps // self.period - 1)
            if self.order == "atc":
                self.assign(averaged)
            else:
                self.pending = averaged

    def averages(self, round_: int) -> list[torch.Tensor]:
        values = [flat(module) for module in self.modules]
        result = list(values)
        for group in grid_groups(self.size, round_):
            mean = torch.stack([values[rank] for rank in group]).mean(0)
            for rank in group:
                result[rank] = mean
        return result

    def assign(self, values: list[torch.Tensor]) -> None:
        for module, value in zip(self.modules, values, strict=True):
            nn.utils.vector_to_parameters(value.clone(), module.parameters())  # it makes views


class Worker:
    """One rank that trains as Replicas does."""

    def __init__(self, rank: Rank, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.module = model()
        self.ddp = DistributedDataParallel(self.module, process_group=group, bucket_cap_mb=0.0005)
        self.optimizer = make_optimizer(self.module)
        self.sync = torchext.attach(self.ddp, self.optimizer, bucket_mb=0.001)
        self.steps = 0

    def step(self) -> None:
        inputs, targets = batch(self.rank, self.steps)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.ddp(inputs), targets).backward()
        self.optimizer.step()
        self.steps += 1


def body_follows_replicas(rank: Rank) -> float:
    rank.init("dssync")
    worst = 0.0
    for size, order, period in [*itertools.product((2, 3, 4, 6, 8), ORDERS, (1,)), (4, "atc", 3), (4, "cta", 2)]:
        with row(size, order, period):
            group = new_group("dssync", list(range(size)), order=order, sync_period=period)
            if rank.rank >= size:
                continue
            worker, expected = Worker(rank, group), Replicas(size, order, period)
            for _ in range(7):  # no multiple of any number of rounds
                worker.step()
                expected.step()
                worker.sync.wait()
                difference = (flat(worker.module) - flat(expected.modules[worker.rank])).abs().max()
                worst = largest(worst, float(difference))
            stats = worker.sync.stats()
            assert stats["averages"] == 7 // period and stats["steps"] == 7, stats
            worker.sync.detach()
    return worst


def test_training_follows_replicas_in_one_process() -> None:
    assert largest(run_ranks(body_follows_replicas, 8, deadline=120)) < 1e-6


def body_reaches_the_mean(rank: Rank) -> float:
    """Frozen values that differ: p rounds give the exact mean."""
    rank.init("dssync")
    worst = 0.0
    for size, rounds in ((2, 1), (4, 2), (6, 2), (8, 3)):
        for order in ORDERS:
            with row(size, order):
                group = new_group("dssync", list(range(size)), group_size=2, order=order)
                if rank.rank >= size:
                    continue
                generator = torch.Generator().manual_seed(rank.rank)
                module = nn.Linear(5, 3)
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.copy_(torch.rand(parameter.shape, generator=generator))
                mean = everywhere_in(group, flat(module)).mean(0)
                ddp = DistributedDataParallel(module, process_group=group, init_sync=False)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
                sync = torchext.attach(ddp, optimizer)
                for _ in range(rounds + (order == "cta")):  # its average arrives with the next step
                    ddp(torch.ones(1, 5)).sum().backward()
                    optimizer.step()
                sync.wait()
                worst = largest(worst, float((flat(module) - mean).abs().max()))
                sync.detach()
    return worst


def everywhere_in(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


def test_a_pass_over_the_grid_reaches_the_mean() -> None:
    assert largest(run_ranks(body_reaches_the_mean, 8, deadline=120)) < 1e-6


def body_schedules(rank: Rank) -> bool:
    rank.init("dssync")
    racks = [0, 0, 1, 1]
    schedules: list[dict[str, Any]] = [
        {"schedule": "grid"},
        {"schedule": "grid", "group_size": 3},
        {"schedule": "random", "seed": 3},
        {"schedule": "topology"},  # one host here: nothing to measure, nothing to cross
        {"schedule": "topology", "racks": racks},
    ]
    for options, order in itertools.product(schedules, ORDERS):
        with row(options, order):
            trainer = Trainer(rank, backend="dssync", order=order, **options)
            before = trainer.evaluate()
            trainer.run(41)
            trainer.sync.wait()
            stats = trainer.sync.stats()
            assert stats["averages"] == stats["steps"] == 41, stats
            assert set(stats["group_sizes"]) <= {2, 4}, stats
            assert trainer.evaluate() < 0.8 * before, options
            trainer.sync.synchronize()
            equal_everywhere(trainer.module)
            trainer.sync.detach()
    # 1 / 0.2: five rounds inside the racks, then one of all four ranks.
    options = {"schedule": "topology", "racks": racks, "host_bandwidth": 1.0, "uplink_bandwidth": 0.2}
    trainer = Trainer(rank, backend="dssync", order="atc", **options)
    assert torchext.backend_of(trainer.group).topology == {
        "racks": racks,
        "host_bandwidth": 1.0,
        "uplink_bandwidth": [0.2, 0.2],
    }
    sizes = []
    for _ in range(12):
        trainer.step()
        trainer.sync.wait()
        sizes.append(dict(trainer.sync.stats()["group_sizes"]))
        if len(sizes) % 6:
            local = everywhere(flat(trainer.module))
            assert torch.equal(local[0], local[1]) and torch.equal(local[2], local[3])
            assert not torch.equal(local[0], local[2])
        else:
            equal_everywhere(trainer.module)
    assert sizes[4] == {2: 5} and sizes[5] == {2: 5, 4: 1} and sizes[11] == {2: 10, 4: 2}, sizes
    trainer.sync.detach()
    return True


def test_every_schedule_trains() -> None:
    assert run_ranks(body_schedules, 4, deadline=120) == [True] * 4


def body_resume(rank: Rank) -> bool:
    rank.init("dssync")
    expected = Replicas(4, "atc")
    worker = Worker(rank, new_group("dssync", order="atc"))
    for _ in range(7):
        worker.step()
    saved = copy.deepcopy((worker.module.state_dict(), worker.optimizer.state_dict(), worker.sync.state_dict()))
    assert saved[2] == {"version": 1, "steps": 7}
    worker.sync.detach()
    resumed = Worker(rank, new_group("dssync", order="atc"))
    resumed.module.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.sync.load_state_dict(saved[2])
    resumed.steps = 7
    for _ in range(4):
        resumed.step()
    resumed.sync.wait()
    for _ in range(11):
        expected.step()
    torch.testing.assert_close(flat(resumed.module), flat(expected.modules[rank.rank]), rtol=0, atol=1e-6)
    resumed.sync.detach()
    return True


def test_the_position_survives_a_checkpoint() -> None:
    assert run_ranks(body_resume, 4) == [True] * 4


def check_skipped_step(rank: Rank, order: str) -> None:
    """A gradient scaler makes one rank skip a step: the others meet it again at the next collective call."""
    trainer = Trainer(rank, backend="dssync", order=order)
    for phase in range(3):
        for step in range(6):
            trainer.optimizer.zero_grad()
            trainer.loss(6 * phase + step).backward()
            if not (rank.rank == 1 and step == 2 + phase):
                trainer.optimizer.step()
            if step == 4:
                dist.all_reduce(torch.zeros(1), group=trainer.group)
        if phase == 1:
            trainer.evaluate()
        else:
            trainer.sync.synchronize()
            equal_everywhere(trainer.module)
        assert trainer.sync.state_dict()["steps"] == 6 * (phase + 1)
    stats = trainer.sync.stats()
    assert stats["steps"] == (15 if rank.rank == 1 else 18) and stats["averages"] == 18, stats
    trainer.sync.detach()


def check_skipped_steps(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    """Some skip more steps than the others can go on without them, who do not come to the meeting before."""
    skipped = {0: (), 1: (2, 3, 5), 2: (7,), 3: (0, 1, 2, 3)}[rank.rank]
    trainer = Trainer(rank, backend=backend, **options)
    for phase in range(3):
        for step in range(8):
            trainer.optimizer.zero_grad()
            trainer.loss(8 * phase + step).backward()
            if step not in skipped:
                trainer.optimizer.step()
        if phase == 1:
            trainer.evaluate()
        else:
            trainer.sync.synchronize()
            equal_everywhere(trainer.module)
        assert trainer.sync.state_dict()["steps"] == 8 * (phase + 1)
    stats = trainer.sync.stats()
    period = options.get("sync_period", 1)
    # The rounds of the furthest, and none besides.
    assert stats["steps"] == 24 - 3 * len(skipped) and stats["averages"] == 24 // period, stats
    for step in range(24, 32):
        trainer.optimizer.zero_grad()
        trainer.loss(step).backward()
        if rank.rank != 2 or step < 28:
            trainer.optimizer.step()
    trainer.sync.detach()
    stats = trainer.sync.stats()
    assert stats["steps"] == 24 - 3 * len(skipped) + (4 if rank.rank == 2 else 8), stats
    assert stats["averages"] == 32 // period, stats


SKIPPING: list[tuple[str, dict[str, Any]]] = [
    ("dssync", {"order": "atc"}),
    ("dssync", {"order": "cta"}),
    ("dssync", {"schedule": "random", "sync_period": 2}),
    ("prague", {"generator": "static"}),
]


def body_skips(rank: Rank) -> None:
    rank.init("dssync")
    for order in ORDERS:
        with row("one step", order):
            check_skipped_step(rank, order)
    for backend, options in SKIPPING:
        with row("several steps", backend, options):
            check_skipped_steps(rank, backend, options)


def test_ranks_that_skip_steps_catch_up() -> None:
    run_ranks(body_skips, 4, deadline=120)


def body_swa(rank: Rank) -> bool:
    """Averages over workers and time: torch's AveragedModel, fed with the exact average of all workers."""
    rank.init("dssync")
    trainer = Trainer(rank, backend="dssync")
    swa = AveragedModel(trainer.module)
    means = []
    for _ in range(4):
        trainer.run(3)
        trainer.sync.wait()
        mean = everywhere(flat(trainer.module)).mean(0)
        with trainer.sync.averaged() as module:
            swa.update_parameters(module)
            torch.testing.assert_close(flat(module), mean, rtol=0, atol=1e-6)
        means.append(mean)
    torch.testing.assert_close(flat(swa.module), torch.stack(means).mean(0), rtol=0, atol=1e-6)
    equal_everywhere(swa.module)
    trainer.sync.detach()
    return True


def test_stochastic_weight_averaging() -> None:
    assert run_ranks(body_swa, 4) == [True] * 4


# ---- Bad input ----


def body_refused(rank: Rank) -> list[str]:
    rank.init("dssync")
    odd = rank.rank == 2
    messages = []
    for options in (
        {"schedule": "random" if odd else "grid"},
        {"schedule": "random", "seed": int(odd)},
        {"schedule": "topology", "racks": [0, 0, 1] if odd else [0, 1, 1]},
        {"schedule": "topology", "racks": [0, 0, 1] if odd else []},
    ):
        with pytest.raises(dist.DistBackendError) as error:
            Trainer(rank, backend="dssync", **options)
        messages.append(str(error.value))
    return messages


def test_ranks_that_disagree() -> None:
    for schedule, seed, racks, none in run_ranks(body_refused, 3):
        assert "DSSyncOptions.schedule is grid on rank 0 and random on rank 2" in schedule, schedule
        assert "DSSyncOptions.seed is 0 on rank 0 and 1 on rank 2" in seed, seed
        assert "DSSyncOptions.racks[1] is 1 on rank 0 and 0 on rank 2" in racks, racks
        assert "the number of DSSyncOptions.racks is 0 on rank 0 and 3 on rank 2" in none, none
