"""Inside ``averaged()`` the optimizer's state is one, too: the average of all workers', which belongs together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attached import batch, equal_everywhere, everywhere, mlp, new_group
from case_choice import slow_on
from elastic_training import ElasticTraining
from harness import Rank, launch, run_ranks
from rows import row
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import _C
from torchext.decentralized.averaged_state import AveragedState
from torchext.errors import ReplicaWarning

pytestmark = pytest.mark.sanitize

AVERAGING = ["prague", "dssync", "hop"]


class Holder(torch.optim.Optimizer):
    """Has the state that a test gives it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


def check_kinds(rank: Rank) -> None:
    """Every kind of value that an optimizer may keep, on three ranks, of which the last has no state of some."""
    r, last = rank.rank, rank.rank == 2
    parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in range(6)]
    holder = Holder(parameters)
    state = holder.state
    state[parameters[0]] = {
        "step": torch.tensor(float(3 + r)),
        "moment": torch.full((2, 3), float(r)).t().contiguous().t(),
        "half": torch.full((3,), 1.0 + r, dtype=torch.bfloat16),
        "rate": torch.tensor(0.5 + r, dtype=torch.float64),
        "count": 7 + r,
        "factor": 0.25 * (r + 1),
        "ticks": torch.tensor(5 - r),
        "empty": torch.zeros(0),
    }
    if not last:
        state[parameters[1]] = {"step": torch.tensor(4.0), "moment": torch.full((2, 3), 3.0), "product": 0.5}
    # Not to be averaged: quantized, a list, None, and another make on another rank.
    state[parameters[2]] = {"codes": torch.full((2, 3), 10 + r, dtype=torch.uint8), "scale": torch.ones(2) * r}
    if r > 0:
        state[parameters[3]] = {"history": [torch.ones(2) * r], "none": None, "moment": torch.ones(2) * r}
    state[parameters[4]] = {"moment": torch.ones(1 + r)}
    before = {p: dict(values) for p, values in state.items()}

    average = AveragedState(holder, parameters, dist.group.WORLD)
    assert all(state[p][k] is v for p, values in before.items() for k, v in values.items())
    average.put()

    first = state[parameters[0]]
    assert list(first) == list(before[parameters[0]])
    assert first["step"].dtype == torch.float32 and float(first["step"]) == 5
    assert first["moment"].equal(torch.ones(2, 3))
    assert first["half"].dtype == torch.bfloat16 and first["half"].equal(torch.full((3,), 2.0, dtype=torch.bfloat16))
    assert first["rate"].dtype == torch.float64 and float(first["rate"]) == 1.5
    assert type(first["count"]) is int and first["count"] == 9
    assert type(first["factor"]) is float and first["factor"] == 0.5
    assert first["ticks"].dtype == torch.int64 and int(first["ticks"]) == 5
    assert first["empty"].shape == (0,)
    second = state[parameters[1]]
    assert float(second["step"]) == 4 and second["product"] == 0.5
    assert second["moment"].equal(torch.full((2, 3), 2.0))
    assert int(state[parameters[2]]["codes"][0, 0]) == 10 and state[parameters[2]]["scale"].equal(torch.zeros(2))
    assert state[parameters[3]]["history"][0].equal(torch.ones(2)) and state[parameters[3]]["none"] is None
    assert state[parameters[3]]["moment"].equal(torch.ones(2))
    assert state[parameters[4]]["moment"].equal(torch.ones(1))
    assert parameters[5] not in state

    state[parameters[0]] = {}
    average.take_back()
    assert {p: dict(values) for p, values in state.items()} == before
    assert all(state[p][k] is v for p, values in before.items() for k, v in values.items())
    average.take_back()
    assert len(state) == len(before)


def check_runs(rank: Rank) -> None:
    """More than one all-reduce takes, of two dtypes."""
    kinds = [torch.float32, torch.float64]
    parameters = [nn.Parameter(torch.zeros(1 << 20, dtype=kinds[k % 2])) for k in range(12)]
    holder = Holder(parameters)
    for k, parameter in enumerate(parameters):
        holder.state[parameter] = {"moment": torch.full_like(parameter, 2.0 * k * rank.rank, requires_grad=False)}
    AveragedState(holder, parameters, dist.group.WORLD).put()
    for k, parameter in enumerate(parameters):
        moment = holder.state[parameter]["moment"]
        assert moment.dtype == kinds[k % 2]
        torch.testing.assert_close(moment, torch.full_like(moment, 2.0 * k))  # a third of three ranks' is rounded
        assert moment.untyped_storage().nbytes() == moment.nbytes  # who saves it saves nothing else


def body_kinds(rank: Rank) -> None:
    rank.init("gloo")
    with row("kinds of values"):
        check_kinds(rank)
    with row("more than one run"):
        check_runs(rank)


def test_kinds_of_state() -> None:
    run_ranks(body_kinds, 3)


class Tokens(nn.Module):
    """An embedding of which each rank sees other rows, and a layer that rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 1)
        self.more = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor, use_more: bool) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden) + (self.more(hidden) if use_more else 0)


def train_tokens(rank: Rank, ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 32, (16,), generator=generator) + 32 * rank.rank % 64
        optimizer.zero_grad()
        ddp(tokens, rank.rank == 0).square().mean().backward()
        optimizer.step()


def check_saved(rank: Rank, backend: str, path: str) -> None:
    ddp = DistributedDataParallel(Tokens(), process_group=new_group(backend), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    sync = torchext.attach(ddp, optimizer)
    train_tokens(rank, ddp, optimizer, 12)
    own = copy.deepcopy(optimizer.state_dict())["state"]
    objects = {p: dict(values) for p, values in optimizer.state.items()}
    with sync.averaged():
        state = copy.deepcopy(optimizer.state_dict())["state"]
        model_state, optimizer_state = get_state_dict(ddp, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    assert {p: dict(values) for p, values in optimizer.state.items()} == objects

    assert sorted(state) == [0, 1, 2, 3, 4]  # of more on ranks that have none, too
    for number, values in state.items():
        assert float(values["step"]) == 12
        for name in ("exp_avg", "exp_avg_sq"):
            mean = everywhere(own[number][name] if number in own else torch.zeros_like(values[name])).mean(0)
            torch.testing.assert_close(values[name], mean, rtol=1e-5, atol=1e-9)
            all_ = everywhere(values[name])
            assert all_.equal(all_[:1].expand_as(all_))
        # What a step divides: a mean is not above the root of the mean of squares but by what each worker's was.
        assert (values["exp_avg"].abs() / (values["exp_avg_sq"].sqrt() + 1e-8)).max() < 8

    loaded = {
        "optimizer": {
            "state": {
                name: {k: torch.zeros_like(v) for k, v in values.items()}
                for name, values in optimizer_state["state"].items()
            }
        }
    }
    dcp.load(loaded, checkpoint_id=path)
    for name, values in optimizer_state["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(loaded["optimizer"]["state"][name][key], value, rtol=0, atol=0)
    with sync.averaged(optimizer_state=False):
        assert {p: dict(values) for p, values in optimizer.state.items()} == objects
    train_tokens(rank, ddp, optimizer, 2)
    sync.synchronize()
    sync.detach()


def body_saved(rank: Rank, folder: Path) -> None:
    rank.init()
    for backend in AVERAGING:
        with row(backend):
            check_saved(rank, backend, str(folder / backend))


def test_moments_of_a_file_belong_together(tmp_path: Path) -> None:
    run_ranks(body_saved, 2, tmp_path)


def body_dies(rank: Rank, backend: str, action: str) -> Any:
    """A worker is gone when parameters have been averaged, and the optimizer's state has not."""
    training = ElasticTraining(rank, backend, {})
    training.train(4)
    rank.report("ready")
    if rank.rank == 2:
        _C.arm_fault_point("averaged.state", action)
    with training.sync.averaged() as module:
        equal_everywhere(module, training.ddp.process_group)
        for values in training.optimizer.state.values():
            all_ = everywhere(values["momentum_buffer"].reshape(-1), training.ddp.process_group)
            assert (all_ == all_[0]).all()
    training.train(4)
    training.sync.synchronize()
    stats = training.sync.stats()
    training.sync.detach()
    return stats["workers"], stats["lost_ranks"]


@pytest.mark.parametrize("action", ["kill", "throw"])
@pytest.mark.parametrize("backend", slow_on(AVERAGING, "dssync"))
def test_a_worker_is_lost_between_parameters_and_state(backend: str, action: str) -> None:
    with launch(body_dies, 3, backend, action) as ranks:
        ranks.expect("ready")
        for outcome in ranks.outcomes([0, 1], deadline=60):
            assert outcome.ok, outcome.trace
            assert outcome.value == (2, [2])


def check_scripted(rank: Rank, backend: str) -> None:
    """A scripted model takes fewer hooks; it is trained, warned of, averaged and saved all the same."""
    ddp = DistributedDataParallel(torch.jit.script(mlp()), process_group=new_group(backend))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    sync = torchext.attach(ddp, optimizer)
    for step in range(3):
        inputs, targets = batch(rank.rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
    with pytest.warns(ReplicaWarning):
        ddp.state_dict()
    with sync.averaged() as module:
        for value in (*module.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values())):
            all_ = everywhere(value.reshape(-1))
            assert (all_ == all_[0]).all()
    sync.detach()


def body_scripted(rank: Rank) -> None:
    rank.init()
    for backend in AVERAGING:
        with row(backend):
            check_scripted(rank, backend)


def test_a_scripted_model() -> None:
    run_ranks(body_scripted, 2)
