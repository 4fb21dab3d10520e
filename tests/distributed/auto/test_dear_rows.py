"""Layers whose rows travel beside ``dear``: training is single-process training, in both forms, and so is all state."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Rank, launch
from largest import largest
from made_plans import Beside, Net, bucket_bytes, local_link, plan_for
from rows import values_in_turn
from test_apply import adamw, dear_at_once, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import auto
from torchext.auto import SyncPlan, live_choice

EXACT = 1e-5
FORMS = ("replicated", "sharded")
LAYERS = ("first", "third")


def with_rows(model: nn.Module, form: str, ranks: int) -> SyncPlan:
    """A plan that has chosen rows of two layers beside ``dear``, with the rest in two buckets."""
    plan = plan_for(model, "dear", form, ranks=ranks)
    assert plan.chosen is not None
    names = [parameter.name for parameter in plan.profile.parameters]
    kept = [at for at, name in enumerate(names) if not name.startswith(LAYERS)]
    chosen = dataclasses.replace(plan.chosen, factor_layers=LAYERS, buckets=(tuple(kept[:2]), tuple(kept[2:])))
    return dataclasses.replace(plan, candidates=(plan.candidates[0], chosen))


def beside(rank: Rank, model: nn.Module, form: str, optimizer: Any, **ddp: Any) -> Beside:
    """Trained by such a plan from the first step on."""
    plan = with_rows(model, form, rank.size)
    return Beside(rank, model, plan, optimizer, process_group=dear_at_once(form), trust=True, **ddp)


def check_same_bits(model: nn.Module) -> None:
    """All ranks have the same parameters."""
    for parameter in model.parameters():
        others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(others, parameter.detach())
        assert all(torch.equal(other, parameter) for other in others)


def body_exact(rank: Rank, form: str) -> dict[str, float]:
    rank.init("gloo")
    worst = {}
    cases: list[tuple[str, nn.Module, Any, dict[str, Any], dict[str, Any]]] = [
        ("sgd", Net(), sgd, {}, {}),
        ("adamw", Net(), adamw, {}, {}),
        ("no_sync", Net(), sgd, {}, {"accumulate": True}),
        ("frozen", Net(frozen=True), adamw, {}, {}),
        ("unused", Net(unused=True), adamw, {"find_unused_parameters": True}, {}),
    ]
    for name, model, optimizer, ddp, how in cases:
        pair = beside(rank, model, form, optimizer, **ddp)
        assert isinstance(pair.sync, torchext.DearSynchronizer)
        pair.run(20, **how)
        if name == "sgd":
            stats = pair.sync.stats()
            assert (stats["mode"], stats["decided"]) == ("dear", True)
            plan = with_rows(Net(), form, rank.size)
            assert stats["buckets"] == bucket_bytes(plan)
        worst[name] = pair.apart()
        check_same_bits(pair.model)
        pair.sync.detach()
        pair.run(3)  # as plain DDP, with the rows
        worst[f"{name}, detached"] = pair.apart_now()
    # With all-reduce first, and again in turn with dear's buckets.
    model = Net()
    pair = Beside(rank, model, with_rows(model, form, rank.size), adamw)
    for steps, mode in ((30, "dear"), (10, "allreduce")):
        pair.run(steps)
        stats = pair.sync.stats()
        assert (stats["mode"], stats["decided"]) == (mode, False)
    worst["in turn"] = pair.apart()
    dist.destroy_process_group()
    return worst


def test_rows_beside_dear_train_as_one_process_does() -> None:
    for form, ranks in values_in_turn({form: (body_exact, form) for form in FORMS}, 2, deadline=240).items():
        for worst in ranks:
            assert largest(worst.values()) < EXACT, (form, worst)


def body_gradients(rank: Rank, form: str) -> dict[str, float]:
    """Gradients between the pass and the step: clipped, unscaled, changed; and a closure."""
    rank.init("gloo")
    worst = {}
    pair = beside(rank, Net(), form, sgd)
    for step in range(20):
        pair.optimizer.zero_grad(set_to_none=step % 2 == 0)
        pair.twin_optimizer.zero_grad()
        pair.backward()
        for own, other in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.allclose(own.grad.norm(), other.grad.norm(), rtol=1e-4)
        limit = 0.05
        clip = nn.utils.clip_grad_norm_(pair.twin.parameters(), limit)
        own_clip = functools.partial(nn.utils.clip_grad_norm_, list(pair.model.parameters()))
        by: Any = pair.sync.clip_grad_norm_ if step % 2 else own_clip
        assert torch.allclose(by(limit), clip, rtol=1e-4)
        pair.optimizer.step()
        pair.twin_optimizer.step()
        pair.steps += 1
    worst["clip"] = pair.apart()
    pair.sync.detach()

    pair = beside(rank, Net(), form, adamw)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(20):
        inputs = torch.rand(8, 16, generator=torch.Generator().manual_seed(step)) * 2 - 1
        spoiled = torch.full_like(inputs, float("inf")) if step == 7 else inputs
        part = slice(rank.rank, None, rank.size)
        pair.optimizer.zero_grad()
        pair.twin_optimizer.zero_grad()
        given = spoiled[part] if rank.rank == 1 else inputs[part]
        scaler.scale(pair.ddp(given).pow(2).mean()).backward()
        scaler.step(pair.optimizer)
        scaler.update()
        if step != 7:  # skipped on all ranks
            pair.twin(inputs).pow(2).mean().backward()
            pair.twin_optimizer.step()
    assert scaler.get_scale() == 4.0
    worst["scaler"] = pair.apart()
    pair.sync.detach()

    pair = beside(rank, Net(), form, sgd)
    for _ in range(5):

        def closure() -> float:
            pair.optimizer.zero_grad()
            pair.twin_optimizer.zero_grad()
            pair.backward()
            return 0.0

        assert pair.optimizer.step(closure) == 0.0
        pair.twin_optimizer.step()
        pair.steps += 1
    worst["closure"] = pair.apart()
    dist.destroy_process_group()
    return worst


def test_what_is_done_to_gradients_counts() -> None:
    for form, ranks in values_in_turn({form: (body_gradients, form) for form in FORMS}, 2, deadline=240).items():
        for worst in ranks:
            assert largest(worst.values()) < EXACT, (form, worst)


def close(ours: Any, theirs: Any) -> bool:
    """Whether two optimizer states are the same."""
    names, wanted = ({key: set(values) for key, values in one["state"].items()} for one in (ours, theirs))
    if names != wanted or ours["param_groups"] != theirs["param_groups"]:
        return False
    return all(
        torch.allclose(torch.as_tensor(ours["state"][key][name]), torch.as_tensor(value), atol=1e-5)
        for key, values in theirs["state"].items()
        for name, value in values.items()
    )


def body_state(rank: Rank, form: str) -> None:
    rank.init("gloo")
    pair = beside(rank, Net(), form, adamw)
    pair.run(6)
    whole = copy.deepcopy(pair.optimizer.state_dict())
    assert close(whole, pair.twin_optimizer.state_dict())
    shared = copy.deepcopy(pair.sync.optimizer_state_dict())
    # As plain dear has it, under the same names: a checkpoint loads with rows and without.
    plain = Net()
    plan = plan_for(plain, "dear", form, ranks=rank.size)
    without = Beside(rank, plain, plan, adamw, process_group=dear_at_once(form), trust=True)
    without.run(6)
    others = copy.deepcopy(without.sync.optimizer_state_dict())
    assert {key: value.shape for key, value in shared.items()} == {key: value.shape for key, value in others.items()}
    other = beside(rank, Net(), form, adamw)
    assert other.sync.optimizer_state_dict().keys() == shared.keys()  # before its first step
    without.run(1)
    assert without.apart() < EXACT
    for loaded, state in ((other, others), (without, shared), (other, shared), (other, whole)):
        load: Any = loaded.optimizer.load_state_dict if state is whole else loaded.sync.load_optimizer_state_dict
        assert not close(loaded.optimizer.state_dict(), whole)
        load(copy.deepcopy(state))
        assert close(loaded.optimizer.state_dict(), whole)
        loaded.model.load_state_dict(pair.model.state_dict())
        loaded.twin.load_state_dict(pair.model.state_dict())
        loaded.twin_optimizer.load_state_dict(copy.deepcopy(whole))
        loaded.run(3)
        assert loaded.apart() < EXACT
    for trained in (pair, without, other):
        trained.sync.detach()
    assert close(pair.optimizer.state_dict(), whole)
    dist.destroy_process_group()


def test_state_is_that_of_the_plain_optimizer() -> None:
    values_in_turn({form: (body_state, form) for form in FORMS}, 2, deadline=240)


def body_by_hand(rank: Rank) -> None:
    """The calls of a script of one's own, and what is refused."""
    rank.init("dear", pg_options=torchext.DeAROptions(allreduce_fallback=False))
    model = Net()
    layers = auto.FactorLayers(model, ["second"], 16)
    layers.install()
    ddp = DistributedDataParallel(model)
    layers.follow(ddp)
    first = torch.optim.SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1)
    second = torch.optim.AdamW([*model.third.parameters(), *model.head.parameters()], lr=0.1)
    sync = torchext.attach(ddp, [first, second])
    for _ in range(3):
        ddp(torch.rand(4, 16)).pow(2).mean().backward()
        before = model.second.weight.detach().clone()
        gradient = model.second.weight.grad
        assert gradient is not None
        first.step()
        second.step()
        assert torch.allclose(model.second.weight, before - 0.1 * gradient)
        first.zero_grad()
        second.zero_grad()
    check_same_bits(model)
    assert layers.stats()["steps"] == 3
    with ddp.no_sync():
        ddp(torch.rand(4, 16)).sum().backward()
    with pytest.raises(RuntimeError, match="no averaged gradients"):  # of the other layers
        first.step()
    sync.detach()
    layers.remove()

    # An optimizer of its own steps what dear is not given.
    model = Net()
    layers = auto.FactorLayers(model, ["second"], 16)
    layers.install()
    ddp = DistributedDataParallel(model)
    layers.follow(ddp)
    rows = torch.optim.SGD(model.second.parameters(), lr=0.1)
    rest = torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("second")], lr=0.1)
    sync = torchext.attach(ddp, rest)
    ddp(torch.rand(4, 16)).pow(2).mean().backward()
    rows.step()
    rest.step()
    check_same_bits(model)
    sync.detach()

    # A model of which no rows are sent.
    model = Net()
    plan = with_rows(model, "replicated", rank.size)
    plain = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="the plan sends rows of 'first', and nothing does that here"):
        torchext.attach(plain, sgd(plain.parameters()), plan=plan)
    # Of which they were.
    layers = auto.FactorLayers(model, ["second"], 16)
    layers.install()
    ddp = DistributedDataParallel(model)
    layers.follow(ddp)
    layers.remove()
    with pytest.raises(ValueError, match=r"DDP was told to ignore second\.weight"):
        torchext.attach(ddp, sgd(ddp.parameters()))
    dist.destroy_process_group()


def body_live(rank: Rank) -> None:
    rank.init("torchext")
    model = Net()
    layers = auto.FactorLayers(model, LAYERS, 16)
    layers.install()
    ddp = DistributedDataParallel(model)
    layers.follow(ddp)
    optimizer = sgd(model.parameters())
    with mock.patch.object(live_choice, "calibrate", lambda group, **_: local_link(group.size(), "torchext")):
        sync = torchext.attach(ddp, optimizer)
        assert isinstance(sync, auto.AutoSynchronizer)
        for _ in range(9):
            optimizer.zero_grad()
            ddp(torch.rand(4, 16)).pow(2).mean().backward()
            optimizer.step()
    assert sync.dear is None
    assert "not possible: layers send rows already" in sync.explain()
    check_same_bits(model)
    dist.destroy_process_group()


def test_scripts_of_their_own() -> None:
    """With the calls made by hand, and with a live choice, which leaves a model with rows to DDP."""
    values_in_turn({"by hand": (body_by_hand,), "live": (body_live,)}, 2)


def body_lost(rank: Rank) -> None:
    rank.init("gloo", timeout=20)
    pair = beside(rank, Net(), "replicated", sgd)
    pair.run(3)
    rank.report("trained")
    rank.pause()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        pair.run(3)


@pytest.mark.slow  # the wait for rows is that of test_factor_layers.py
def test_a_lost_rank_is_named() -> None:
    with launch(body_lost, 2) as ranks:
        ranks.expect("trained")
        ranks.kill(1)
        ranks.proceed([0])
        assert ranks.outcomes([0])[0].ok
