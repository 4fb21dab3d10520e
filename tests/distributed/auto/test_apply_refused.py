"""What differs between ranks, or from the plan, is raised on all ranks before anything is built; what verify says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from made_plans import STEP_SECONDS, Net, local_link, plan_for, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import auto
from torchext.auto import SyncPlan
from torchext.auto import apply as apply_module


class Permuted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = self._modules.pop("first")  # registered last


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def not_built(*_: Any, **__: Any) -> Any:
    raise AssertionError("DDP was built")


def text_of(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def body_refused(rank: Rank, folder: Path) -> list[str]:
    rank.init("gloo")
    plan = plan_for(Net(), "ddp", "program", ranks=2)
    dear = plan_for(Net(), "dear", "sharded", ranks=2)
    path = folder / f"plan{rank.rank}.json"
    plan.save(path)
    assert SyncPlan.load(path) == plan
    other = dataclasses.replace(plan, torch_version="0") if rank.rank else plan
    frozen = Net(frozen=rank.rank == 1)
    link = local_link(2)
    elsewhere = dataclasses.replace(plan, link=dataclasses.replace(link, host_of=(0, 1)))
    derived = dataclasses.replace(plan, link=link.scaled(rate=1e9))
    three = dataclasses.replace(plan, link=local_link(3))
    wider = nn.Sequential(nn.Linear(16, 8))
    model, wrong = Net(), [] if rank.rank else sgd(Net())
    apply_module.DistributedDataParallel = not_built  # type: ignore[assignment,misc]
    lost: Any = dist.DistBackendError
    texts = [
        text_of(lost, lambda: plan.apply(p := Permuted() if rank.rank else Net(), sgd(p))),
        text_of(lost, lambda: other.apply(model, sgd(model))),
        text_of(lost, lambda: plan.apply(frozen, sgd(frozen))),
        text_of(lost, lambda: plan.apply(model, sgd(model), find_unused_parameters=rank.rank == 0)),
        text_of(ValueError, lambda: plan.apply(wider, sgd(wider))),
        text_of(ValueError, lambda: plan.apply(n := Net(unused=True), sgd(n))),
        text_of(ValueError, lambda: plan.apply(n := Net().double(), sgd(n))),
        text_of(ValueError, lambda: three.apply(model, sgd(model), trust=True)),
        text_of(ValueError, lambda: elsewhere.apply(model, sgd(model))),
        text_of(ValueError, lambda: derived.apply(model, sgd(model))),
        text_of(ValueError, lambda: plan.apply(model, wrong)),
        text_of(ValueError, lambda: plan.apply(model, sgd(model), bucket_cap_mb=4)),
        text_of(TypeError, lambda: dear.apply(model, torch.optim.LBFGS(model.parameters()), trust=True)),
    ]
    apply_module.DistributedDataParallel = DistributedDataParallel
    texts.append(text_of(TypeError, lambda: plan.apply(DistributedDataParallel(Net()), sgd(model))))
    for trusted in (elsewhere, SyncPlan.load(path)):
        model = Net()
        ddp, sync = trusted.apply(model, sgd(model), trust=trusted is elsewhere)
        assert isinstance(ddp, DistributedDataParallel)
        assert isinstance(sync, torchext.Synchronizer)
    dist.destroy_process_group()
    return texts


def test_what_differs_is_raised_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(body_refused, 2, tmp_path)
    expected = [
        "parameter 0 is 'first.weight, torch.float32, (24, 16), trained' on rank 0 and 'second.weight, ",
        "the plan (its hash) is '",
        "(20, 24), trained' on rank 0 and 'second.weight, torch.float32, (20, 24), frozen' on rank 1",
        "find_unused_parameters is True on rank 0 and False on rank 1",
        "'head.bias' has shape (3,) there and none here",
        "it lacks 'never.weight', which the model trains",
        "'head.bias' is torch.float32 there and torch.float64 here",
        "the plan is for 3 ranks, and the group has 2",
        "the plan is for ranks on the hosts (0, 1), and these are on (0, 0); call torchext.auto.plan here",
        "derived from another by formula",
        "the list of optimizers is empty",
        "bucket_cap_mb is what the plan chooses",
        "LBFGS steps several times inside one call",
        "the model is wrapped (DistributedDataParallel)",
    ]
    for text, own, part in zip(first, second, expected, strict=True):
        assert part in text
        assert part in own
    assert first[:10] == second[:10]


def body_attach(rank: Rank) -> list[str]:
    """Plans for attach, which the script's own group must fit."""
    rank.init("dear")
    plan = plan_for(Net(), "dear", "sharded", ranks=2, backend="dear")
    plain = plan_for(Net(), "ddp", "default", ranks=2, backend="dear")
    texts = []

    def attach(
        given: Any, kind: type[Exception], backend: str = "dear", bucket_mb: Any = "auto", **options: Any
    ) -> None:
        chosen = torchext.DeAROptions(**options) if backend == "dear" else None
        group = dist.new_group(backend=backend, pg_options=chosen)
        ddp = DistributedDataParallel(Net(), process_group=group)
        texts.append(text_of(kind, lambda: torchext.attach(ddp, sgd(ddp), plan=given, bucket_mb=bucket_mb)))

    attach(plan, ValueError, form="sharded", bucket_mb=4)
    attach(plan, ValueError, "prague")
    attach("fast", TypeError)
    attach(plan, ValueError, form="replicated")
    attach(plain, ValueError, form="sharded")
    attach(plan, ValueError, form="sharded", transport="hierarchical")
    other = dataclasses.replace(
        plan, profile=dataclasses.replace(plan.profile, parameters=plan.profile.parameters[::-1])
    )
    attach(other if rank.rank else plan, dist.DistBackendError, form="sharded")
    group = dist.new_group(backend="dear", pg_options=torchext.DeAROptions(form="sharded", bucket_mb=2))
    ddp = DistributedDataParallel(Net(), process_group=group)
    texts.append(text_of(ValueError, lambda: torchext.attach(ddp, sgd(ddp), plan=plan)))
    # Frameworks that make the group: attach takes the plan by itself.
    group = dist.new_group(backend="dear", pg_options=torchext.DeAROptions(form="sharded"))
    ddp = DistributedDataParallel(Net(), process_group=group)
    sync = torchext.attach(ddp, sgd(ddp), plan=plan)
    assert sync.stats()["bucket_mb"] == 0
    sync.detach()
    dist.destroy_process_group()
    return texts


def test_attach_refuses_plans_that_do_not_fit() -> None:
    expected = [
        "the plan has buckets, and bucket_mb is 4; leave one of the two out",
        "the plan has buckets for dear, and the group's backend is 'prague'",
        "plan must be a torchext.auto.SyncPlan, got str",
        "the plan is for form='sharded', and the group's DeAROptions have form='replicated'",
        "the plan has chosen 'ddp', and not dear",
        "a transport that is 'ring', and the group's DeAROptions have transport='hierarchical'",
        "gradient in order[0] is head.bias on rank 0 and first.weight on rank 1",
        "the group's DeAROptions have bucket_mb=2",
    ]
    for texts in run_ranks(body_attach, 2):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def body_verify(rank: Rank) -> tuple[Any, list[str]]:
    rank.init("gloo")
    model = Net()
    plan = plan_for(model, "ddp", "program", ranks=2)
    optimizer = sgd(model)
    ddp, sync = plan.apply(model, optimizer)
    texts = [text_of(RuntimeError, lambda: auto.verify(plan, sync, steps=2))]
    for _ in range(25):
        optimizer.zero_grad()
        step(ddp)
        optimizer.step()
    found = auto.verify(plan, sync)
    texts.append(text_of(ValueError, lambda: auto.verify(plan, sync, steps=rank.rank)))
    with pytest.raises(TypeError, match="sync must be"):
        auto.verify(plan, ddp)  # type: ignore[arg-type]
    # What any synchronizer has.
    assert sync.stats() == {"steps": 25, "mode": "allreduce"}
    state = sync.state_dict()
    assert state == {"version": 1, "steps": 25}
    sync.load_state_dict(state | {"steps": 7})
    assert sync.state_dict()["steps"] == 7
    with sync.averaged() as module:
        assert module is model
    step(ddp)
    assert float(sync.clip_grad_norm_(1e-3)) > 1e-3
    sync.wait()
    sync.synchronize()
    sync.detach()
    with pytest.raises(RuntimeError, match=r"after detach"):
        sync.synchronize()
    with pytest.raises(RuntimeError, match="attached already"):
        torchext.attach(ddp, optimizer)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # as with plain DDP
    dist.destroy_process_group()
    return found, texts


def test_verify_compares_the_steps_that_were_taken() -> None:
    (found, first), (same, second) = run_ranks(body_verify, 2)
    assert found == same
    assert found.way.startswith("DDP, 4 buckets")
    assert (found.predicted_ms, found.steps) == (1e3 * STEP_SECONDS, 20)
    assert found.ratio == found.measured_ms / found.predicted_ms > 0
    assert (
        first[0]
        == second[0]
        == "torchext.auto.verify: 0 steps have been timed, and steps is 2; train on, and ask again"
    )
    assert "steps must be a whole number from 1 to 1000, got 0" in first[1]
    assert "rank 0 raised ValueError" in second[1]
