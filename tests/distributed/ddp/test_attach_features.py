"""Attached models with what training loops use: scalers, schedules, closures, modes of DDP, several models, compile."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import ORDERS, Trainer, batch, equal_everywhere, everywhere, flat, mlp, prague
from beside_ddp import Script, check_rows_apart, wide
from harness import Rank, launch, run_ranks
from rows import own_groups
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize


def check_grad_scaler(rank: Rank) -> None:
    trainer = Trainer(rank, generator="smart")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    before = trainer.evaluate()
    for step in range(30):
        trainer.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainer.loss(step)
        scaler.scale(loss).backward()
        if step == 4 and rank.rank == 1:
            next(trainer.module.parameters()).grad[0] = math.inf  # this rank alone skips its step
        scaler.step(trainer.optimizer)
        scaler.update()
    assert trainer.sync.stats()["steps"] == 30 - (rank.rank == 1)
    assert scaler.get_scale() == (2.0**7 if rank.rank == 1 else 2.0**8)
    assert trainer.evaluate() < 0.8 * before
    trainer.sync.synchronize()
    equal_everywhere(trainer.module)
    trainer.sync.detach()


def check_schedules_groups_and_clipping(rank: Rank) -> None:
    for order in ORDERS:
        group = prague(order=order)
        ddp = DistributedDataParallel(mlp(), process_group=group)
        parameters = list(ddp.parameters())
        optimizer = torch.optim.AdamW(
            [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:], "lr": 0.006, "weight_decay": 0.1}]
        )
        sync = torchext.attach(ddp, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
        losses = []
        for step in range(30):
            inputs, targets = batch(rank.rank, step)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.5, error_if_nonfinite=True)
            assert norm > 0
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.02 / 8, 0.006 / 8])
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
        sync.synchronize()
        equal_everywhere(ddp.module)
        sync.detach()


def check_closure(rank: Rank) -> None:
    trainer = Trainer(rank)
    optimizer = trainer.optimizer

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = trainer.loss(0)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(10)]
    assert losses[-1] < losses[0]
    trainer.sync.detach()


def refuses_damaged_states(sync: torchext.Synchronizer) -> None:
    damaged: list[tuple[dict[str, Any], str]] = [
        ({}, "version is missing, got nothing"),
        ({"steps": 3}, "version is missing, got steps"),
        ({"version": 1}, "steps is missing, got version; pass what state_dict"),
        *(
            ({"version": 1, "steps": steps}, rf"steps must be an int in \[0, 2\*\*62\], got {steps!r}")
            for steps in (-5, "x", 2.5, None, True, 2**63)
        ),
    ]
    for state, text in damaged:
        with pytest.raises(ValueError, match=text):
            sync.load_state_dict(state)
    with pytest.raises(TypeError, match="must be a mapping, got 3"):
        sync.load_state_dict(3)  # type: ignore[arg-type]


def check_period_and_state(rank: Rank) -> None:
    # The static schedule leaves nobody alone: every average that is due is one of two or more members.
    for order in ORDERS:
        options = {"generator": "static", "sync_period": 3, "order": order}
        trainer = Trainer(rank, **options)
        for steps in range(1, 12):
            trainer.step()
            trainer.sync.wait()
            stats = trainer.sync.stats()
            assert stats["averages"] == steps // 3 and stats["steps"] == steps, stats
        assert sum(stats["group_sizes"].values()) == 3
        state = trainer.sync.state_dict()
        assert state == {"version": 1, "steps": 11}
        weights = trainer.module.state_dict()
        trainer.sync.detach()

        resumed = Trainer(rank, **options)
        resumed.module.load_state_dict(weights)
        resumed.sync.load_state_dict(state)
        assert resumed.sync.state_dict() == state
        with pytest.raises(ValueError, match="version must be 1, got 2"):
            resumed.sync.load_state_dict({"version": 2, "steps": 0})
        refuses_damaged_states(resumed.sync)
        assert resumed.sync.state_dict() == state
        resumed.step()  # the 12th
        resumed.sync.wait()
        assert resumed.sync.stats()["averages"] == 1
        resumed.sync.detach()


def check_state_dict_waits(rank: Rank) -> None:
    """A checkpoint between a step and the next forward holds the finished average, not half of it."""
    for generator in ("static", "smart"):
        trainer = Trainer(rank, generator=generator)
        for _ in range(5):
            trainer.step()
            saved = torch.cat([v.reshape(-1) for v in trainer.module.state_dict().values()]).clone()
            trainer.sync.wait()
            assert torch.equal(saved, flat(trainer.module))
        trainer.sync.detach()


def check_detach(rank: Rank) -> None:
    for order in ORDERS:
        trainer = Trainer(rank, order=order)
        trainer.run(5)
        trainer.sync.detach()
        trainer.sync.detach()
        steps = trainer.sync.stats()["steps"]
        before = flat(trainer.module)
        # Alone: no rank waits for another.
        if rank.rank != 2:
            losses = trainer.run(20 + 5 * rank.rank)
            assert sum(losses[-5:]) < sum(losses[:5])
            assert not torch.equal(before, flat(trainer.module))
        assert trainer.sync.stats()["steps"] == steps == 5
        dist.barrier()
        all_ = everywhere(flat(trainer.module))
        assert (all_[0] != all_[1]).any()
        for call in (trainer.sync.synchronize, trainer.sync.averaged().__enter__):
            with pytest.raises(RuntimeError, match=r"after detach\(\)"):
                call()


def check_profiler(rank: Rank) -> None:
    """A profile shows where a step's time went, on whichever thread it was spent."""
    trainer = Trainer(rank, generator="smart", model=nn.Linear(8, 300_000 // 8, bias=False))  # long enough for a ring
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(6):
            trainer.optimizer.zero_grad()
            trainer.ddp(batch(rank.rank, step, rows=2)[0]).square().mean().backward()
            trainer.optimizer.step()
        trainer.sync.synchronize()
    count = {event.key: event.count for event in profile.key_averages() if event.key.startswith("torchext::")}
    assert count["torchext::wait_generator"] == 6, count
    averages = trainer.sync.stats()["averages"]
    assert count.get("torchext::average", 0) >= averages - 1, (count, averages)
    assert count["torchext::wait_peers"] >= averages
    assert count["torchext::exact_average"] == 1
    trainer.sync.detach()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.trunk(inputs)


def check_ddp_modes(rank: Rank) -> None:
    modes = [
        (Branching, {"find_unused_parameters": True}),
        (mlp, {"static_graph": True}),
        (mlp, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        (mlp, {"broadcast_buffers": False}),
    ]
    for make, ddp in modes:
        trainer = Trainer(rank, model=make(), ddp=ddp)
        before = trainer.evaluate()
        trainer.run(30)
        assert trainer.evaluate() < 0.8 * before, ddp
        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        trainer.sync.detach()


def check_other_models(rank: Rank) -> None:
    torch.manual_seed(0)
    frozen = mlp()
    frozen[0].requires_grad_(False)
    tied = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    tied[2].weight = tied[0].weight
    strided = mlp()
    strided[2].weight = nn.Parameter(torch.rand(16, 16).t() / 4)
    for model in (frozen, tied, strided):
        trainer = Trainer(rank, model=model)
        kept = frozen[0].weight.detach().clone()
        trainer.run(12)
        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        torch.testing.assert_close(frozen[0].weight, kept) if model is frozen else None
        trainer.sync.detach()
    half = Trainer(rank, model=nn.Linear(8, 1).to(torch.bfloat16))
    for step in range(4):
        half.optimizer.zero_grad()
        half.ddp(batch(rank.rank, step)[0].to(torch.bfloat16)).square().mean().backward()
        half.optimizer.step()
    half.sync.synchronize()
    equal_everywhere(half.module)
    half.sync.detach()


def check_several_models(rank: Rank) -> None:
    """Three models of one loop, two of them in one group: workers wait for different models of each other."""
    for generator in ("static", "smart", "random"):
        models = [Trainer(rank, generator=generator, order="atc"), Trainer(rank, generator=generator)]
        models.append(Trainer(rank, group=models[0].group))
        for step in range(20):
            # Not in the same order everywhere: nothing orders the models of a process, once DDP has made its own
            # collective calls in the first two steps.
            shift = rank.rank if step % 2 and step > 2 else 0
            for turn in range(3):
                models[(turn + shift) % 3].step()
            if step % 10 == 9:
                dist.all_reduce(torch.zeros(1))
        for model in models:
            model.sync.synchronize()
            assert model.sync.stats()["averages"] > 0
        for model in models:
            equal_everywhere(model.module)
            model.sync.detach()


CHECKS = [
    check_grad_scaler,
    check_schedules_groups_and_clipping,
    check_closure,
    check_period_and_state,
    check_state_dict_waits,
    check_detach,
    check_profiler,
    check_ddp_modes,
    check_other_models,
    check_several_models,
]


def body_checks(rank: Rank) -> int:
    rank.init()
    for check in CHECKS:
        rank.report(check.__name__)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with own_groups():
                check(rank)
    return len(CHECKS)


def test_training_loops() -> None:
    assert run_ranks(body_checks, 4, deadline=120) == [len(CHECKS)] * 4


def body_pausing(rank: Rank) -> None:
    rank.init()
    store = dist.distributed_c10d._get_default_store()
    for order in ORDERS:
        trainer = Trainer(rank, group_size=2, order=order)
        trainer.run(5)
        if rank.rank == 4:
            rank.pause()
            store.set(f"{order} goes on", "")
        else:
            trainer.run(30)
            rank.report(f"{order} went on")
            # Who is left alone would be held, so as not to run ahead of everybody.
            while not store.check([f"{order} goes on"]):
                trainer.run(1)
        trainer.sync.synchronize()
        equal_everywhere(trainer.module)
        trainer.sync.detach()


def test_a_worker_that_stops_between_two_steps_holds_up_one_group() -> None:
    with launch(body_pausing, 5) as ranks:
        for order in ORDERS:
            # Of the four others two at most have been put into a group with the fifth.
            word = f"{order} went on"
            went_on = ranks.wait_until(lambda words, _, word=word: sum(word in said for said in words) >= 2, 60)  # type: ignore[misc]
            assert went_on, order
            ranks.proceed([4])
        ranks.values()


def compiled(script: Script, place: str) -> torch.Tensor:
    """What is under way when the next pass begins is waited for inside a compiled model, too."""
    torch._dynamo.reset()  # what the other row has compiled
    model: Any = wide()
    script.wrap(torch.compile(model, backend="aot_eager") if place == "inside" else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    script.attach(optimizer)
    called = torch.compile(script.ddp, backend="aot_eager") if place == "outside" else script.ddp
    for _ in range(10):
        optimizer.zero_grad()
        (called(script.inputs()) - 1).square().mean().backward()
        optimizer.step()
    assert not script.attached or script.sync.stats()["averages"] > 0
    return script.result()


def test_compiled() -> None:
    try:
        torch.compile(nn.Identity(), backend="aot_eager")
    except RuntimeError as error:  # an interpreter that torch.compile does not support
        pytest.skip(str(error))
    check_rows_apart({place: ("prague", compiled, place) for place in ("inside", "outside")})
