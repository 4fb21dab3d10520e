"""Training by a plan is single-process training, whatever exact way it has chosen, with the very buckets it has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from largest import largest
from made_plans import Beside, Net, bucket_bytes, plan_for
from pretended_hosts import be_on_host, needs_root
from rows import values_in_turn
from torch import nn

import torchext
from torchext import auto
from torchext.ddp.plain_synchronizer import PlainSynchronizer

EXACT = 1e-5
WAYS = (("ddp", "default"), ("ddp", "program"), ("dear", "sharded"), ("dear", "replicated"))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def dear_at_once(form: str) -> dist.ProcessGroup:
    """A group on which the plan's buckets are used from the first step on."""
    options = torchext.DeAROptions(form=form, allreduce_fallback=False)
    return dist.new_group(backend="dear", pg_options=options)


def group_for(way: str, form: str) -> dict[str, Any]:
    if way != "dear":
        return {}
    return {"process_group": dear_at_once(form), "trust": True}  # the link was that of another backend


def body_exact(rank: Rank) -> dict[str, float]:
    rank.init("gloo")
    worst = {}
    for way, form in WAYS:
        plain, unused = Net(), Net(unused=True)
        cases: list[tuple[str, nn.Module, Any, dict[str, Any], dict[str, Any]]] = [
            ("sgd", plain, sgd, {}, {}),
            ("adamw", Net(), adamw, {}, {}),
            ("no_sync", Net(), sgd, {}, {"accumulate": True}),
            ("frozen", Net(frozen=True), sgd, {}, {}),
            ("unused", unused, adamw, {"find_unused_parameters": True}, {}),
        ]
        for name, model, optimizer, ddp, how in cases:
            plan = plan_for(model, way, form, ranks=rank.size)
            beside = Beside(rank, model, plan, optimizer, **ddp, **group_for(way, form))
            assert isinstance(beside.sync, torchext.DearSynchronizer if way == "dear" else PlainSynchronizer)
            beside.run(20, **how)
            if way == "dear":
                # What no step reaches has a bucket of its own.
                rest = [sum(p.nbytes for p in model.never.parameters())] if name == "unused" else []
                stats = beside.sync.stats()
                assert (stats["mode"], stats["decided"], stats["bucket_mb"]) == ("dear", True, 0.0)
                assert stats["buckets"] == bucket_bytes(plan) + rest
            worst[f"{way} {form} {name}"] = beside.apart()
            beside.sync.detach()
    dist.destroy_process_group()
    return worst


def test_exact_plans_train_as_one_process_does() -> None:
    for worst in run_ranks(body_exact, 2, deadline=120):
        assert largest(worst.values()) < EXACT, worst


def body_hierarchical(rank: Rank) -> dict[str, float]:
    be_on_host(rank.rank % 2)
    rank.init("gloo")
    worst = {}
    for form in ("sharded", "replicated"):
        model = Net()
        plan = plan_for(model, "dear", form, ranks=rank.size)
        assert plan.chosen is not None
        chosen = dataclasses.replace(plan.chosen, transport="hierarchical")
        plan = dataclasses.replace(plan, candidates=(plan.candidates[0], chosen))
        beside = Beside(rank, model, plan, adamw, trust=True)
        options: Any = torchext.backend_of(beside.ddp.process_group).options
        assert options.transport == "hierarchical"
        beside.run(20)
        worst[form] = beside.apart()
        beside.sync.detach()
    dist.destroy_process_group()
    return worst


@needs_root
def test_a_plan_by_the_hierarchical_transport() -> None:
    for worst in run_ranks(body_hierarchical, 4, deadline=120):
        assert largest(worst.values()) < EXACT, worst


class Seen:
    """The buckets of DDP, as its communication hook gets them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sizes = group, [0]

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.sizes.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer().div_(2), group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


def buckets_in_step(rank: Rank, model: nn.Module, plan: auto.SyncPlan, **ddp: Any) -> list[int]:
    """Of the third step, when DDP has built its buckets anew."""
    beside = Beside(rank, model, plan, sgd, **ddp)
    seen = Seen(dist.group.WORLD)
    beside.ddp.register_comm_hook(None, lambda _, bucket: seen.reduce(bucket))
    beside.run(2)
    seen.sizes.clear()
    beside.run(1)
    assert beside.apart() < EXACT
    return seen.sizes


def body_buckets(rank: Rank) -> None:
    rank.init("gloo")
    for ends in ((1, 2, 3, 4, 5, 6, 7), (2, 3, 6), (5,), ()):
        model = Net()
        plan = plan_for(model, "ddp", "program", ranks=2, ends=ends)
        assert buckets_in_step(rank, model, plan) == bucket_bytes(plan)
        # In the order of registration, turned around; what no step reaches goes with the layer before it.
        model = Net(unused=True)
        plan = plan_for(model, "ddp", "program", ranks=2, ends=ends)
        found = buckets_in_step(rank, model, plan, find_unused_parameters=True)
        found[0] -= sum(p.nbytes for p in model.never.parameters())
        assert found == bucket_bytes(plan)
    # Limits cannot give buckets of two element types: the nearest size that suits all is taken.
    model = nn.Sequential(nn.Linear(16, 8), Doubled(), nn.Linear(8, 8).double())
    plan = plan_for(model, "ddp", "program", ranks=2, ends=(2,))
    ddp, _ = plan.apply(model, sgd(model.parameters()))
    assert ddp.bucket_bytes_cap == sum(p.nbytes for p in model.parameters()) // 2
    # With dear there are buckets of each.
    model = nn.Sequential(nn.Linear(16, 8), Doubled(), nn.Linear(8, 8).double())
    plan = plan_for(model, "dear", "sharded", ranks=2, ends=(1, 2, 3))
    ddp, sync = plan.apply(model, sgd(model.parameters()), process_group=dear_at_once("sharded"), trust=True)
    assert sync.stats()["buckets"] == bucket_bytes(plan)
    sync.detach()
    dist.destroy_process_group()


class Doubled(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs).double()


def test_buckets_are_the_plans() -> None:
    run_ranks(body_buckets, 2)


def body_confirmed(rank: Rank) -> tuple[list[str], dict[str, Any], float]:
    """On a group that the plan makes: plain all-reduce for 22 steps, then both in turn."""
    rank.init("gloo", timeout=20)
    plan = plan_for(Net(), "dear", "sharded", ranks=2)
    beside = Beside(rank, Net(), plan, sgd)
    assert torchext.backend_of(beside.ddp.process_group).options._timeout.total_seconds() == 20
    modes, buckets = [], []
    for _ in range(11 + 66):
        assert not beside.sync.stats()["decided"]
        if len(modes) == 70:
            with pytest.raises(RuntimeError, match="dear still compares"):
                auto.verify(plan, beside.sync, steps=5)
        beside.run(1)
        stats = beside.sync.stats()
        modes.append(stats["mode"])
        if stats["mode"] == "dear":
            buckets.append(stats["buckets"])
    assert all(found == bucket_bytes(plan) for found in buckets)
    assert not stats["tuner"]
    # The last window is of dear; what has been decided was used in none of them yet.
    found = auto.verify(plan, beside.sync, steps=5)
    assert found.way.startswith("dear, sharded, 4 buckets" if stats["mode"] == "dear" else "DDP, default")
    apart = beside.apart()
    beside.sync.detach()
    dist.destroy_process_group()
    return modes, stats, apart


def body_other_order(rank: Rank) -> tuple[float, dict[str, Any]]:
    """The plan was made of a model that ends where this one begins."""
    rank.init("dear", pg_options=torchext.DeAROptions(form="replicated", allreduce_fallback=False))
    plan = plan_for(Net(), "dear", "replicated", ranks=2, backend="dear")
    profile = dataclasses.replace(plan.profile, parameters=plan.profile.parameters[::-1])
    beside = Beside(rank, Net(), dataclasses.replace(plan, profile=profile), sgd)
    assert beside.ddp.process_group is dist.group.WORLD  # a group of dear's with this form is used
    assert len(beside.sync.stats()["buckets"]) == 4
    beside.run(20)
    stats, apart = beside.sync.stats(), beside.apart()
    beside.sync.detach()
    dist.destroy_process_group()
    return apart, stats


def test_buckets_of_dear_are_confirmed_or_sizes_are_tried() -> None:
    found = values_in_turn({"compared": (body_confirmed,), "another order": (body_other_order,)}, 2, deadline=120)
    for modes, stats, apart in found["compared"]:  # with plain all-reduce
        assert stats["decided"]
        assert modes[:-1] == [mode for mode in ("allreduce", *("allreduce", "dear") * 3) for _ in range(11)][1:]
        assert apart < EXACT
    for apart, stats in found["another order"]:
        assert apart < EXACT
        assert not stats["decided"]
        assert stats["bucket_mb"] > 0


def body_inexact(rank: Rank) -> list[str]:
    rank.init("gloo")
    names = []
    for way, form in (("prague", "cta"), ("dssync", "cta"), ("hop", "parallel")):
        partners = 1 if way == "hop" else 2
        plan = plan_for(Net(), way, form, ranks=2, exact=False, partners=partners, rho=0.0)
        beside = Beside(rank, Net(), plan, sgd)
        beside.run(3)
        beside.sync.synchronize()
        names.append(torchext.backend_of(beside.ddp.process_group).name())
        beside.sync.detach()
    dist.destroy_process_group()
    return names


def test_inexact_plans_make_groups_of_their_backend() -> None:
    assert run_ranks(body_inexact, 2) == [["prague", "dssync", "hop"]] * 2
