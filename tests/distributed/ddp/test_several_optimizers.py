"""Several optimizers of one model, attached as a list: beside plain DDP, on every backend."""

from __future__ import annotations

import copy
import io
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS, equal_everywhere, everywhere, flat
from beside_ddp import ATTACHED, DEAR
from harness import Rank, launch
from rows import Rows, row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

AVERAGING = ["prague", "dssync", "hop"]
EXACT = 1e-9  # of float64; sums in another order


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.body(self.embed(tokens)))))


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    return matrices, [p for p in model.parameters() if not any(p is m for m in matrices)]


def sgd_twice(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Steps that are linear in the gradients: averages of replicas are exactly DDP."""
    matrices, others = split(model)
    return [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.SGD(others, lr=0.05, momentum=0.5, weight_decay=0.01),
    ]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def adams(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    return [torch.optim.RMSprop(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


class Run:
    """Plain DDP, or a form."""

    def __init__(self, form: str | None, make: Any) -> None:
        backend, options = ATTACHED[form] if form else ("gloo", None)
        group = dist.new_group(backend=backend, pg_options=None if options is None else OPTIONS[backend](**options))
        self.model = Net().double()
        self.ddp = DistributedDataParallel(self.model, process_group=group)
        self.optimizers = make(self.model)
        self.sync: Any = torchext.attach(self.ddp, self.optimizers) if form else None
        self.step_count = 0
        self.scaler: Any = None

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + self.step_count)
        self.step_count += 1
        tokens = torch.randint(0, 8, (5,), generator=generator)
        target = torch.randint(0, 3, (5,), generator=generator)
        return nn.functional.cross_entropy(self.ddp(tokens), target)

    def weights(self) -> torch.Tensor:
        if self.sync is not None:
            self.sync.synchronize()
        return flat(self.model)


def zero_first(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.loss().backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
    for optimizer in run.optimizers:
        optimizer.step()


def zero_in_turn(run: Run) -> None:
    """Each is zeroed behind its own step, while the other has not stepped."""
    run.loss().backward()
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=run.step_count % 2 == 0)


def accumulating(run: Run) -> None:
    with run.ddp.no_sync():
        run.loss().backward()
    run.loss().backward()
    for optimizer in reversed(run.optimizers):
        optimizer.step()
    run.model.zero_grad()


def scheduled(run: Run) -> None:
    run.loss().backward()
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def left_out(run: Run) -> None:
    """The second makes every other step; its gradients are thrown away in between."""
    run.loss().backward()
    run.optimizers[0].step()
    if run.step_count % 2:
        run.optimizers[1].step()
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def in_turns(run: Run) -> None:
    """Each has passes of its own."""
    optimizer = run.optimizers[run.step_count % 2]
    for own in run.optimizers:
        own.zero_grad()
    run.loss().backward()
    optimizer.step()


def overflowing(run: Run) -> None:
    """A scaler leaves one of the optimizers out, in one step."""
    if run.scaler is None:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.scaler.scale(run.loss()).backward()
    if run.step_count == 3:
        run.model.norm.weight.grad.mul_(float("inf"))
    for optimizer in run.optimizers:
        run.scaler.step(optimizer)
    run.scaler.update()


LOOPS = [zero_first, zero_in_turn, accumulating, scheduled, left_out, in_turns, overflowing]


def body_beside(rank: Rank, form: str, make: Any) -> dict[str, float]:
    rank.init("gloo")
    apart = {}
    for loop in LOOPS:
        plain, run = Run(None, make), Run(form, make)
        for _ in range(6):
            loop(plain)
            loop(run)
        apart[loop.__name__] = float((plain.weights() - run.weights()).abs().max())
        equal_everywhere(run.model)
        run.sync.detach()
        loop(plain)
        loop(run)
        if form in DEAR:  # the others' optimizers keep states of their own
            apart[f"{loop.__name__}, detached"] = float((flat(plain.model) - flat(run.model)).abs().max())
    return apart


def check_beside(rows: Rows) -> None:
    for row, both in row_values(body_beside, 2, rows).items():
        for apart in both:
            assert all(difference < EXACT for difference in apart.values()), (row, apart)


def test_linear_steps_beside_plain_ddp() -> None:
    check_beside({form: (form, sgd_twice) for form in ATTACHED})


def test_other_steps_beside_plain_ddp() -> None:
    table = [*((form, adams) for form in DEAR), ("dear-replicated", muon_and_adamw), ("dear", muon_and_adamw)]
    check_beside({f"{form}, {make.__name__}": (form, make) for form, make in table})


def body_averaging(rank: Rank, backend: str) -> None:
    """Muon and AdamW: trained apart, averaged, saved as one, and loaded."""
    rank.init(backend)
    ddp = DistributedDataParallel(Net().double())
    optimizers = muon_and_adamw(ddp.module)
    sync = torchext.attach(ddp, optimizers)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * rank.rank + step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        tokens, target = (torch.randint(0, n, (5,), generator=generator) for n in (8, 3))
        nn.functional.cross_entropy(ddp(tokens), target).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert sync.stats()["steps"] == 6  # not 12
    own = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    with sync.averaged():
        equal_everywhere(ddp.module)
        for optimizer in optimizers:
            for values in optimizer.state_dict()["state"].values():
                for value in values.values():
                    all_ = everywhere(value.reshape(-1))
                    assert (all_ == all_[0]).all()
    for optimizer, before in zip(optimizers, own, strict=True):
        torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    sync.detach()


def test_decentralized_replicas() -> None:
    row_values(body_averaging, 3, {backend: (backend,) for backend in AVERAGING})


def body_goes_on(rank: Rank, backend: str, newcomer: bool) -> Any:
    """A worker dies between the steps of two optimizers, and the others train on; a newcomer takes its place."""
    if newcomer and rank.rank == 3:
        rank.pause()
        torchext.join_running_job(backend, f"file://{rank.folder / 'store'}")
    else:
        rank.init(backend, timeout=60, world_size=3)
    ddp = DistributedDataParallel(Net().double())
    optimizers = adams(ddp.module)
    sync = torchext.attach(ddp, optimizers, on_peer_failure="continue")

    def train(steps: int, dies: bool = False) -> None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * rank.rank + step)
            tokens, target = (torch.randint(0, n, (5,), generator=generator) for n in (8, 3))
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(tokens), target).backward()
            optimizers[0].step()
            if dies and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizers[1].step()

    if rank.rank < 3:
        train(8, dies=rank.rank == 2)
        sync.synchronize()  # before it, one of the two may still count the third
        rank.report("two left")
    end = time.monotonic() + 40
    while newcomer and sync.stats()["workers"] < 3:
        assert time.monotonic() < end, sync.stats()
        sync.synchronize()
    train(6)
    with sync.averaged():
        equal_everywhere(ddp.module)
        states = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in optimizers]
    steps = {float(values["step"]) for state in states for values in state.values()}
    workers = sync.stats()["workers"]
    sync.detach()
    return workers, sorted(steps)


@pytest.mark.parametrize("newcomer", [False, True])
@pytest.mark.parametrize("backend", AVERAGING)
def test_others_train_on(backend: str, newcomer: bool) -> None:
    with launch(body_goes_on, 4 if newcomer else 3, backend, newcomer) as ranks:
        ranks._killed.add(2)  # by itself
        ranks.expect("two left", [0, 1])
        if newcomer:
            ranks.proceed([3])
        for outcome in ranks.outcomes(deadline=60):
            assert outcome.ok, outcome.trace
            workers, steps = outcome.value
            assert workers == (3 if newcomer else 2)
            assert len(steps) == 1 and steps[0] >= 14, steps


def body_states(rank: Rank, form: str) -> None:
    """Saved as plain optimizers' states, loaded by a new run, and as shards."""
    rank.init("gloo")
    run, plain = Run(form, adams), Run(None, adams)
    for _ in range(4):
        zero_first(run)
        zero_first(plain)
    for own, other in zip(run.optimizers, plain.optimizers, strict=True):
        torch.testing.assert_close(own.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)
    file = io.BytesIO()
    torch.save([run.model.state_dict(), *(own.state_dict() for own in run.optimizers)], file)
    shards = {key: copy.deepcopy(value) for key, value in run.sync.optimizer_state_dict().items()}
    again = Run(form, adams)
    model, *states = torch.load(io.BytesIO(file.getvalue()))
    again.model.load_state_dict(model)
    for own, state in zip(again.optimizers, states, strict=True):
        own.load_state_dict(state)
    third = Run(form, adams)
    third.model.load_state_dict(model)
    third.sync.load_optimizer_state_dict(shards)
    with pytest.raises(ValueError, match=r"'99.exp_avg'"):
        third.sync.load_optimizer_state_dict({**shards, "99.exp_avg": torch.ones(1)})
    again.step_count = third.step_count = run.step_count
    for _ in range(3):
        for one in (run, again, third):
            zero_first(one)
    for one in (again, third):
        torch.testing.assert_close(run.weights(), one.weights(), rtol=1e-9, atol=1e-12)


def test_states_are_saved_and_loaded() -> None:
    row_values(body_states, 2, {form: (form,) for form in DEAR})


def body_read_between(rank: Rank, form: str) -> Any:
    rank.init("gloo")
    run, plain = Run(form, adams), Run(None, adams)
    for _ in range(3):
        for one in (run, plain):
            one.loss().backward()
            one.optimizers[0].step()
        try:
            read = flat(run.model)
        except RuntimeError as error:
            return str(error)
        torch.testing.assert_close(read, flat(plain.model), rtol=1e-9, atol=1e-12)
        for one in (run, plain):
            one.optimizers[1].step()
            for optimizer in one.optimizers:
                optimizer.zero_grad()
    torch.testing.assert_close(run.weights(), plain.weights(), rtol=1e-9, atol=1e-12)
    return ""


def test_parameters_are_read_between_the_steps() -> None:
    for form, both in row_values(body_read_between, 2, {form: (form,) for form in DEAR}).items():
        for said in both:
            assert ("form='replicated'" in said) == (form == "dear-sharded"), (form, said)
