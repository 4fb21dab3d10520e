"""The backend ``torchext`` decides in a pass that all ranks average in, whatever else each of them does."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from largest import largest
from made_plans import ROWS, Net
from rows import values_in_turn
from test_live_choice import BEFORE, EXACT, adamw, at_once, chosen, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import auto


class Pair:
    """A model on all ranks, and its twin by this process alone; the batch of each step is the same on all ranks."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, **ddp: Any) -> None:
        model = Net()
        twin = copy.deepcopy(model)
        self.ddp, self.twin = DistributedDataParallel(model, **ddp), twin
        self.nets: list[tuple[Any, torch.optim.Optimizer]] = [
            (self.ddp, optimizer(model.parameters())),
            (twin, optimizer(twin.parameters())),
        ]
        self.sync = torchext.attach(self.ddp, self.nets[0][1])

    def choice(self) -> auto.AutoSynchronizer:
        assert isinstance(self.sync, auto.AutoSynchronizer)
        return self.sync

    def apart(self) -> float:
        self.sync.synchronize()
        return self.apart_now()

    def apart_now(self) -> float:
        pairs = zip(self.ddp.module.parameters(), self.twin.parameters(), strict=True)
        return largest(float((a - b).detach().abs().max()) for a, b in pairs)


def batch(step: int) -> torch.Tensor:
    return torch.rand(ROWS, 16, generator=torch.Generator().manual_seed(step))


def loss_of(net: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = net(batch(step)).pow(2).mean()
    return loss


def train_on(pair: Pair, step: int, passes: int = 1, *, accumulate: bool = False) -> None:
    """One step. With several passes: inside ``no_sync()`` but for the last, or all outside."""
    for net, optimizer in pair.nets:
        optimizer.zero_grad()
        for part in range(passes):
            local = accumulate and net is pair.ddp and part < passes - 1
            with net.no_sync() if local else contextlib.nullcontext():
                loss_of(net, passes * step + part).backward()
        optimizer.step()


def with_collectives(rank: Rank) -> float:
    """Rank 0 alone makes passes that no step follows, and the script has collectives of its own all the time."""
    pair = Pair()
    for step in range(BEFORE + 4):
        for net, optimizer in pair.nets:
            optimizer.zero_grad()
            loss = loss_of(net, step)
            if rank.rank == 0:
                torch.autograd.grad(loss, net.parameters(), retain_graph=True)
            dist.all_reduce(torch.ones(3))
            loss.backward()
            dist.all_reduce(torch.ones(4))
            optimizer.step()
            if rank.rank == 0 and step > 0:  # behind the first step all come: DDP builds its buckets anew
                loss_of(net, 100)
            dist.all_reduce(torch.ones(5))
    assert pair.choice().dear is not None
    apart = pair.apart()
    pair.sync.detach()
    return apart


def skipping(rank: Rank, skipped: list[set[int]]) -> str:
    """Each rank skips steps of its own, and collectives stand everywhere."""
    model = Net()
    ddp, optimizer = DistributedDataParallel(model), sgd(model.parameters())
    sync = torchext.attach(ddp, optimizer)
    for step in range(BEFORE + 3):
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        dist.all_reduce(torch.ones(3))
        if step not in skipped[rank.rank]:
            optimizer.step()
        dist.all_reduce(torch.ones(4))
    assert isinstance(sync, auto.AutoSynchronizer)
    told = sync.explain() if sync.dear is None else sync.stats()["mode"]
    sync.detach()
    return told


def accumulating() -> list[float]:
    """Inside no_sync(), and by passes that all average: the decision then comes within a step."""
    worst = []
    for passes, accumulate in ((3, True), (3, False)):
        pair = Pair(adamw)
        for step in range(BEFORE + 4):
            train_on(pair, step, passes, accumulate=accumulate)
        assert pair.choice().dear is not None
        worst.append(pair.apart())
        pair.sync.detach()
    return worst


def two_models() -> list[float]:
    """Each with a step of its own, and both in one loss."""
    worst = []
    for together in (False, True):
        pairs = [Pair(), Pair(adamw)]
        for step in range(BEFORE + 4):
            for nets in zip(*(pair.nets for pair in pairs), strict=True):
                for _, optimizer in nets:
                    optimizer.zero_grad()
                losses = [loss_of(net, step) for net, _ in nets]
                for loss in [torch.stack(losses).sum()] if together else losses[::-1]:
                    loss.backward()
                for _, optimizer in nets:
                    optimizer.step()
        for pair in pairs:
            assert pair.choice().dear is not None
            worst.append(pair.apart())
            pair.sync.detach()
    return worst


def scaled(rank: Rank) -> float:
    """One rank has an overflow, and all skip that step, the eighth among them."""
    pair = Pair()
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in pair.nets]
    for step in range(BEFORE + 4):
        overflow = step in (2, BEFORE - 1, BEFORE)
        for (net, optimizer), scaler in zip(pair.nets, scalers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(net, step)
            scaler.scale(loss * float("inf") if overflow and (rank.rank == 0 or net is pair.twin) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert pair.choice().dear is not None
    apart = pair.apart()
    pair.sync.detach()
    return apart


def in_closures() -> float:
    """The pass that decides is within a step, behind which dear takes over."""
    pair = Pair()
    for step in range(BEFORE + 4):
        for net, optimizer in pair.nets:

            def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer, step: int = step) -> Any:
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            optimizer.step(closure)
        assert (pair.choice().dear is not None) == (step >= BEFORE - 1)
    assert pair.sync.stats()["steps"] == BEFORE + 4
    apart = pair.apart()
    pair.sync.detach()
    return apart


def body(rank: Rank, form: str) -> tuple[list[float], list[str]]:
    rank.init("torchext", pg_options=at_once(form))
    with chosen("dear", form):
        apart = [with_collectives(rank), *accumulating(), *two_models(), scaled(rank), in_closures()]
        told = [skipping(rank, [{1, 6}, {4}])]
        if form == "replicated":  # in the sharded form a step is collective
            told.append(skipping(rank, [{1, BEFORE - 1}, {4, 5, BEFORE}]))
    dist.destroy_process_group()
    return apart, told


def test_ranks_decide_together_whatever_each_does() -> None:
    for form, ranks in values_in_turn(
        {form: (body, form) for form in ("replicated", "sharded")}, 2, deadline=240
    ).items():
        for apart, told in ranks:
            assert largest(apart) < EXACT, (form, apart)
            alone = "plain DDP: ranks have taken different numbers of steps"
            assert told == ([alone] if form == "sharded" else ["dear", "dear"])


def body_skips_while_compared(rank: Rank) -> tuple[bool, float]:
    """Beside plain DDP, on which the ranks' models are different ones from then on, too."""
    rank.init("torchext")
    models, steps = [], BEFORE + 77
    with chosen("dear", "replicated"):
        for group in (dist.new_group(backend="gloo"), None):
            model = Net()
            ddp, optimizer = DistributedDataParallel(model, process_group=group), sgd(model.parameters())
            sync = None if group else torchext.attach(ddp, optimizer)
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                if step not in ((30,), (BEFORE + 4, BEFORE + 10, BEFORE + 21))[rank.rank]:
                    optimizer.step()
            models.append(model)
    assert sync is not None
    assert sync.stats()["steps"] == steps - (1, 3)[rank.rank]
    decided = bool(sync.stats()["decided"])
    sync.detach()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return decided, largest(float((a - b).detach().abs().max()) for a, b in pairs)


def test_a_rank_may_skip_steps_alone_while_dear_compares() -> None:
    for decided, apart in run_ranks(body_skips_while_compared, 2):
        assert not decided  # rank 0 has measured a step less when it was due
        assert apart < EXACT
