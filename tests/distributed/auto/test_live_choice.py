"""The backend ``torchext``: attach has no choice to make, and the model stays that of plain DDP whatever is chosen."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from largest import largest
from made_plans import ROWS, Beside, Net, local_link
from rows import values_in_turn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import auto
from torchext.auto import Candidate, live_choice

EXACT = 1e-5
BEFORE = 8  # steps as plain DDP


@contextlib.contextmanager
def chosen(way: str, form: str) -> Iterator[None]:
    """Inside, links are not measured, and the choice is the test's."""
    search = live_choice.search

    def choose(*given: Any, **others: Any) -> list[Candidate]:
        found = search(*given, **others)
        wanted = next(c for c in found if c.possible and (c.way, c.form) == (way, form) and not c.factor_layers)
        return [dataclasses.replace(c, chosen=c is wanted, reason="chosen" if c is wanted else "slower") for c in found]

    def local(group: dist.ProcessGroup, **_: Any) -> auto.LinkModel:
        return local_link(group.size(), "torchext")

    with mock.patch.object(live_choice, "search", choose), mock.patch.object(live_choice, "calibrate", local):
        yield


def at_once(form: str = "replicated") -> torchext.DeAROptions:
    """``dear`` trains from the switch on, without the comparison with all-reduce."""
    return torchext.DeAROptions(form=form, allreduce_fallback=False)


class LiveBeside(Beside):
    """A model on the backend ``torchext`` on all ranks, and its twin by this process alone."""

    def __init__(
        self,
        rank: Rank,
        model: nn.Module,
        optimizer: Callable[[Any], Any],
        group: dist.ProcessGroup | None = None,
        **ddp: Any,
    ) -> None:
        self.rank, self.twin, self.steps = rank, copy.deepcopy(model), 0
        self.model, self.optimizer = model, optimizer(model.parameters())
        self.twin_optimizer = optimizer(self.twin.parameters())
        self.ddp = DistributedDataParallel(model, process_group=group, **ddp)
        self.sync = torchext.attach(self.ddp, self.optimizer)

    def run_late_zero(self, steps: int) -> None:
        """Gradients are zeroed behind the forward pass, and kept."""
        for _ in range(steps):
            inputs = torch.rand(ROWS, 16, generator=torch.Generator().manual_seed(self.steps))
            for model, optimizer in ((self.ddp, self.optimizer), (self.twin, self.twin_optimizer)):
                loss = model(inputs).pow(2).mean()
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()
            self.steps += 1

    def apart_detached(self) -> float:
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        return largest(float((a - b).detach().abs().max()) for a, b in pairs)

    @property
    def auto(self) -> auto.AutoSynchronizer:
        assert isinstance(self.sync, auto.AutoSynchronizer)
        return self.sync


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


def body_exact(rank: Rank, form: str) -> dict[str, float]:
    rank.init("torchext", pg_options=at_once(form))
    worst = {}
    cases: list[tuple[str, nn.Module, Any, dict[str, Any], dict[str, Any]]] = [
        ("sgd", Net(), sgd, {}, {}),
        ("adamw", Net(), adamw, {"gradient_as_bucket_view": True}, {}),
        ("no_sync", Net(), sgd, {}, {"accumulate": True}),
        ("frozen", Net(frozen=True), sgd, {}, {}),
        ("unused", Net(unused=True), adamw, {"find_unused_parameters": True}, {}),
        ("static graph", Net(), sgd, {"static_graph": True}, {}),
    ]
    for name, model, optimizer, ddp, how in cases:
        with chosen("dear", form):
            beside = LiveBeside(rank, model, optimizer, **ddp)
            beside.run(BEFORE - 1, **how)
            assert beside.auto.plan is None
            assert beside.sync.stats() == {"steps": BEFORE - 1, "mode": "allreduce", "decided": False}
            beside.run(1, **how)
            assert beside.auto.plan is not None
            assert beside.sync.stats() == {"steps": BEFORE, "mode": "allreduce", "decided": True}
            beside.run(12, **how)
        stats = beside.sync.stats()
        assert (stats["steps"], stats["mode"]) == (BEFORE + 12, "dear"), stats
        assert beside.auto.dear is not None
        worst[name] = beside.apart()
        beside.sync.detach()
        beside.run(2, **how)  # as plain DDP
        worst[f"{name}, detached"] = beside.apart_detached()
    with chosen("dear", form):
        beside = LiveBeside(rank, Net(), adamw)
        beside.run_late_zero(BEFORE + 6)
        assert beside.sync.stats()["mode"] == "dear"
        worst["zeroed late"] = beside.apart()
        beside.sync.detach()
    dist.destroy_process_group()
    return worst


def test_model_is_that_of_one_process_before_and_after_the_switch() -> None:
    cases = {form: (body_exact, form) for form in ("replicated", "sharded")}
    for form, ranks in values_in_turn(cases, 2, deadline=240).items():
        for worst in ranks:
            assert largest(worst.values()) < EXACT, (form, worst)


def body_measured(rank: Rank) -> tuple[str, str, float, list[str]]:
    rank.init("torchext")
    beside = LiveBeside(rank, Net(), sgd)
    told = [beside.auto.explain()]
    beside.run(5)
    told.append(beside.auto.explain())
    beside.run(15)
    plan = beside.auto.plan
    assert plan is not None
    assert plan.chosen is not None
    assert plan.chosen.exact
    verified = auto.verify(plan, beside.sync, steps=5) if plan.chosen.way == "ddp" else None
    assert verified is None or verified.measured_ms > 0
    apart = beside.apart()
    beside.sync.detach()
    dist.destroy_process_group()
    return repr(plan), plan.explain(), apart, told


def test_ranks_have_one_plan_of_measured_links_and_steps() -> None:
    results = run_ranks(body_measured, 3, deadline=120)
    assert len({plan for plan, *_ in results}) == 1
    for _, text, apart, told in results:
        assert apart < EXACT
        assert told == ["not decided yet: 0 of 8 steps", "not decided yet: 5 of 8 steps"]
        assert "DDP, default buckets" in text
        assert "not possible: the buckets of this DDP model are fixed" in text
        assert "not possible: this DDP model averages all gradients itself" in text
        assert "not possible: form is 'replicated'" in text


def reason(sync: auto.AutoSynchronizer) -> str:
    assert sync.dear is None
    assert sync.stats()["mode"] == "allreduce"
    return sync.explain()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table(inputs[:, 0].abs().long()).mean() + 0 * inputs.sum()


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int = BEFORE + 2) -> None:
    for _ in range(count):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(ROWS, 16)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


class Uneven(Net):
    """Another rank reaches another layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.third(self.second(hidden)) if dist.get_rank() else self.second(hidden)


def body_plain(rank: Rank) -> dict[str, str]:
    rank.init("torchext")
    found = {}
    with mock.patch.object(live_choice, "calibrate", lambda group, **_: local_link(group.size(), "torchext")):
        for name, model, optimizer, ddp_options in (
            ("lbfgs", Net(), lbfgs, {}),
            ("sparse", Sparse(), torch.optim.SGD, {}),
            ("uneven", Uneven(), sgd, {"find_unused_parameters": True}),
        ):
            ddp = DistributedDataParallel(model, **ddp_options)
            own = optimizer(model.parameters())
            sync = torchext.attach(ddp, own)
            steps(ddp, own)
            found[name] = reason(sync)
        model = Net()
        ddp, own = DistributedDataParallel(model), sgd(model.parameters())
        ddp.register_comm_hook(None, lambda _, bucket: average(bucket))
        sync = torchext.attach(ddp, own)
        steps(ddp, own)
        found["hook"] = reason(sync)
        model = Net()
        ddp, own = DistributedDataParallel(model), sgd(model.parameters())
        sync = torchext.attach(ddp, own)
        with ddp.join():
            steps(ddp, own, BEFORE + 2 + rank.rank)
        found["join"] = reason(sync)
    dist.destroy_process_group()
    return found


def average(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def test_plain_ddp_stays_where_dear_cannot_train() -> None:
    for found in run_ranks(body_plain, 2, deadline=120):
        assert "LBFGS steps several times" in found["lbfgs"]
        assert "'table' has sparse gradients" in found["sparse"]
        assert found["uneven"] == "plain DDP: ranks have gradients of different parameters"
        assert "the model has a communication hook" in found["hook"]
        assert found["join"] == "plain DDP: DistributedDataParallel.join() is in use"


def body_methods(rank: Rank) -> None:
    rank.init("torchext", pg_options=at_once())
    with chosen("dear", "replicated"):
        for switched in (False, True):
            beside = LiveBeside(rank, Net(), sgd)
            beside.run(BEFORE + 2 if switched else 3)
            sync = beside.auto
            assert (sync.dear is not None) == switched
            with sync.averaged() as module:
                assert module is beside.model
            sync.wait()
            sync.synchronize()
            assert sync.state_dict() == {"version": 1, "steps": BEFORE + 2 if switched else 3}
            sync.load_state_dict({"version": 1, "steps": 40})
            assert sync.stats()["steps"] == 40
            with pytest.raises(ValueError, match="steps must be an int"):
                sync.load_state_dict({"version": 1, "steps": -1})
            with pytest.raises(ValueError, match="max_norm must be 0 or more"):
                sync.clip_grad_norm_(-1.0)
            with pytest.raises(RuntimeError, match="attached already"):
                torchext.attach(beside.ddp, beside.optimizer)
            beside.optimizer.zero_grad()
            beside.twin_optimizer.zero_grad()
            beside.backward()
            assert float(sync.clip_grad_norm_(float("inf"))) > 0
            beside.optimizer.step()
            beside.twin_optimizer.step()
            saved = beside.optimizer.state_dict()
            assert len(saved["state"]) == len(list(beside.model.parameters()))
            assert beside.apart() < EXACT
            sync.detach()
            sync.detach()
            with pytest.raises(RuntimeError, match=r"after detach\(\)"):
                sync.synchronize()
            beside.run(BEFORE + 3)
            assert sync.stats()["mode"] in (["dear", "allreduce"] if switched else ["allreduce"])
            assert switched or sync.plan is None, "it was detached before"
    dist.destroy_process_group()


def test_methods_before_and_after_the_switch() -> None:
    run_ranks(body_methods, 2)


def body_two_optimizers(rank: Rank) -> float:
    rank.init("torchext", pg_options=at_once("sharded"))
    with chosen("dear", "sharded"):
        model = Net()
        twin = copy.deepcopy(model)
        ddp = DistributedDataParallel(model)

        def halves(net: Net) -> list[torch.optim.Optimizer]:
            last = list(net.head.parameters())
            others = [p for name, p in net.named_parameters() if not name.startswith("head")]
            return [torch.optim.SGD(others, lr=0.05, momentum=0.9), torch.optim.Adam(last, lr=0.01)]

        sets = [(ddp, halves(model)), (twin, halves(twin))]
        sync = torchext.attach(ddp, sets[0][1])
        for number in range(BEFORE + 8):
            inputs = torch.rand(ROWS, 16, generator=torch.Generator().manual_seed(number))
            for net, optimizers in sets:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                net(inputs).pow(2).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        assert sync.stats()["mode"] == "dear"
        sync.synchronize()
        apart = largest(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        sync.detach()
    dist.destroy_process_group()
    return apart


def raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def body_refused(rank: Rank) -> list[str]:
    rank.init("torchext")
    model: nn.Module = Net()
    ddp, optimizer = DistributedDataParallel(model), sgd(model.parameters())

    def attach(**options: Any) -> Callable[[], Any]:
        return lambda: torchext.attach(ddp, optimizer, **options)

    found = [
        raised(ValueError, attach(bucket_mb=4)),
        raised(ValueError, attach(on_peer_failure="continue")),
        raised(TypeError, attach(plan="fastest")),
        raised(ValueError, lambda: torchext.attach(ddp, torch.optim.SGD(model.head.parameters(), lr=1.0))),
    ]
    group = dist.new_group(backend="torchext", pg_options=torchext.DeAROptions(bucket_mb=2.0))
    other = DistributedDataParallel(Net(), process_group=group)
    found.append(raised(ValueError, lambda: torchext.attach(other, sgd(other.parameters()))))
    # A difference that DDP does not look at.
    group = dist.new_group(backend="torchext")
    renamed = nn.ModuleDict({"even" if rank.rank == 0 else "odd": nn.Linear(4, 4)})
    other = DistributedDataParallel(renamed, process_group=group)
    found.append(raised(dist.DistBackendError, lambda: torchext.attach(other, sgd(other.parameters()))))
    dist.destroy_process_group()
    return found


def test_bad_input_is_refused_on_all_ranks() -> None:
    wanted = (
        "bucket_mb is 4, and the backend 'torchext' chooses buckets by itself",
        "on_peer_failure='continue' is for decentralized training",
        "plan must be a torchext.auto.SyncPlan, got str",
        "the optimizer does not own",
        "bucket_mb=2.0, and the backend 'torchext' chooses buckets by itself",
        "parameter 0 is 'even.weight",
    )
    for found in run_ranks(body_refused, 2):
        for text, want in zip(found, wanted, strict=True):
            assert want in text


def body_groups(rank: Rank, name: str) -> list[str]:
    rank.init(name, pg_options=at_once())
    halves = dist.new_group([0, 1], backend="torchext")
    groups: Sequence[Any] = [dist.group.WORLD, *([halves] if rank.rank < 2 else [])]
    found = []
    for group in groups:
        value = torch.full((3,), float(rank.rank + 1))
        dist.all_reduce(value, group=group)
        assert value.tolist() == [sum(range(1, group.size() + 1))] * 3
        found += [dist.get_backend(group), torchext.backend_of(group).name()]
    # A plan that was made before says what it has chosen, and needs no first steps.
    with chosen("dear", "replicated"):
        beside = LiveBeside(rank, Net(), sgd)
        beside.run(BEFORE + 1)
        plan = beside.auto.plan
        assert plan is not None
        beside.sync.detach()
    planned = Beside(rank, Net(), plan, sgd, trust=True)
    assert isinstance(planned.sync, torchext.DearSynchronizer)
    assert planned.ddp.process_group is dist.group.WORLD
    planned.run(3)
    assert planned.sync.stats()["mode"] == "dear"
    assert planned.apart() < EXACT
    planned.sync.detach()
    dist.destroy_process_group()
    return found


def test_groups_of_that_name() -> None:
    cases = {name: (body_groups, name) for name in ("torchext", "cpu:torchext")}
    for name, results in values_in_turn(cases, 3).items():
        world, half = [name, "torchext"], ["torchext"] * 2
        assert results == [world + half, world + half, world], name


def body_compiled(rank: Rank) -> float:
    rank.init("torchext", pg_options=at_once())
    with chosen("dear", "replicated"):
        model = Net()
        twin = copy.deepcopy(model)
        ddp = DistributedDataParallel(torch.compile(model, backend="eager"))
        pairs = [(ddp, sgd(model.parameters())), (twin, sgd(twin.parameters()))]
        sync = torchext.attach(ddp, pairs[0][1])
        for net, optimizer in pairs:
            for number in range(BEFORE + 4):
                optimizer.zero_grad()
                net(torch.rand(ROWS, 16, generator=torch.Generator().manual_seed(number))).pow(2).mean().backward()
                optimizer.step()
        assert sync.stats()["mode"] == "dear"
        sync.synchronize()
        apart = largest(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        sync.detach()
    dist.destroy_process_group()
    return apart


def test_two_optimizers_and_a_compiled_model() -> None:
    found = values_in_turn({"two optimizers": (body_two_optimizers,), "compiled": (body_compiled,)}, 2, deadline=120)
    assert all(largest(apart) < EXACT for apart in found.values()), found
