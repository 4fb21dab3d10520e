"""What "dear" refuses, with which words; what happens when ranks disagree."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, launch, run_ranks
from sharded import FORMS, Branches, Pair, adamw, difference, in_form, made, mlp, sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torchext


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"form": "split"}, r'form must be one of sharded, replicated; got "split"'),
        ({"transport": "nccl"}, r'transport must be one of auto, collectives; got "nccl"'),
        ({"bucket_mb": "big"}, r'bucket_mb must be "auto" or in \[0.001, 4096\] MiB, got "big"'),
        ({"bucket_mb": 0}, r"bucket_mb must be .* got 0"),
        ({"bucket_mb": 5000}, r"bucket_mb must be .* got 5000"),
        ({"bucket_mb": -1.0}, r"bucket_mb must be .* got -1"),
        ({"bucket_mb": float("nan")}, r"bucket_mb must be .* got nan"),
    ],
    ids=str,
)
def test_an_option_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchext.DeAROptions(**options)


class Rotating(torch.optim.Optimizer):
    """Needs whole gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


class Marked(torch.optim.SGD):
    elementwise = True


def body_refused(rank: Rank) -> bool:
    rank.init("dear")
    model = made(mlp)
    ddp = DistributedDataParallel(model)
    refused = {
        "LBFGS steps several times": torch.optim.LBFGS(model.parameters()),
        r"Rotating.*form='replicated'.*Rotating.elementwise = True": Rotating(model.parameters()),
    }
    for text, optimizer in refused.items():
        with pytest.raises(TypeError, match=text):
            torchext.attach(ddp, optimizer)
    for bucket_mb in (0, -3, "small", 1e9):
        with pytest.raises(ValueError, match=r"bucket_mb must be 'auto' or in \[0.001, 4096\], got"):
            torchext.attach(ddp, adamw(model.parameters()), bucket_mb=bucket_mb)
    with pytest.raises(ValueError, match="does not own 2 of the model's trainable parameters"):
        torchext.attach(ddp, adamw(list(model.parameters())[2:]))
    with pytest.raises(ValueError, match="owns 1 parameters that are not the model's"):
        torchext.attach(ddp, adamw([*model.parameters(), nn.Parameter(torch.zeros(2))]))
    hooked = DistributedDataParallel(made(mlp))
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(ValueError, match="has a communication hook"):
        torchext.attach(hooked, adamw(hooked.parameters()))
    sync = torchext.attach(ddp, Marked(model.parameters(), lr=0.1), bucket_mb=1)
    with pytest.raises(RuntimeError, match="attached already"):
        torchext.attach(ddp, adamw(model.parameters()))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(RuntimeError, match="communication hook"):
        ddp(torch.zeros(1, 16))
    sync.detach()
    with pytest.raises(RuntimeError, match="after detach"):
        sync.synchronize()
    return True


def test_what_attach_refuses() -> None:
    assert run_ranks(body_refused, 2) == [True, True]


def body_unknown_state(rank: Rank) -> tuple[str, str, float]:
    rank.init("dear")
    pair = Pair(rank, made(mlp), lambda parameters: Marked(parameters, lr=0.1, momentum=0.9))
    outcome = elapsed_error(pair.sync.optimizer_state_dict)
    assert pair.run(1).sync.optimizer_state_dict()
    return outcome


def test_state_to_load_into_of_an_optimizer_that_is_not_torchs() -> None:
    for kind, message, _ in run_ranks(body_unknown_state, 2):
        assert kind == "RuntimeError" and "Marked has no state yet" in message and "take a step" in message, message


def body_sparse(rank: Rank, fallback: bool) -> tuple[str, str, float]:
    rank.init("dear")
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 4))
    pair = Pair(rank, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), fallback=fallback)
    return elapsed_error(lambda: pair.ddp(torch.arange(8)).square().mean().backward())


@pytest.mark.parametrize("fallback", [False, True])
def test_sparse_gradients(fallback: bool) -> None:
    for kind, message, _ in run_ranks(body_sparse, 2, fallback):
        assert kind == "TypeError" and "0.weight has a Sparse gradient; make it dense" in message, (kind, message)


def body_after_a_death(rank: Rank) -> bool:
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw).run(3)
    rank.report("ready")
    with pytest.raises(dist.DistBackendError, match="rank 2 died"):
        pair.run(1_000_000)
    with pytest.raises(dist.DistBackendError, match="rank 2 died"):
        pair.sync.detach()
    pair.sync.detach()
    # Model and optimizer are as before attach, but for their values.
    model, optimizer = pair.module, pair.optimizer
    assert len(model.state_dict()) == len(list(pair.ddp.parameters())) == len(list(pair.twin.parameters()))
    assert not optimizer.state
    assert all(type(p) is nn.Parameter for group in optimizer.param_groups for p in group["params"])
    model.eval()
    model.load_state_dict(pair.twin.state_dict())
    model.train()
    optimizer.load_state_dict(copy.deepcopy(pair.plain.state_dict()))  # or the two would share it
    for part, its in ((model, optimizer), (pair.twin, pair.plain)):
        its.zero_grad()
        part(torch.ones(2, 16)).square().mean().backward()
        its.step()
    return difference(model, pair.twin) == 0


@pytest.mark.parametrize("form", FORMS)
def test_detach_after_the_death_of_a_worker_frees_model_and_optimizer(form: str) -> None:
    with launch(in_form, 3, form, body_after_a_death) as ranks:
        ranks.expect("ready")
        ranks.kill(2)
        for outcome in ranks.outcomes(deadline=40):
            assert outcome.ok and outcome.value, outcome.trace


def body_disagree(rank: Rank, what: str) -> tuple[str, str, float]:
    rank.init("dear")
    model = nn.Linear(4, 4 + (rank.rank if what == "shape" else 0))
    if what == "frozen" and rank.rank == 1:
        model.bias.requires_grad_(False)
    options = torchext.DeAROptions(bucket_mb=1 + rank.rank if what == "bucket_mb" else 1)
    group = dist.new_group(backend="dear", timeout=timedelta(seconds=20), pg_options=options)
    backend = torchext.backend_of(group)
    parameters = list(model.parameters())
    names = [name + (str(rank.rank) if what == "names" else "") for name, _ in model.named_parameters()]
    make_lane = (lambda: backend) if what == "transport" and rank.rank == 1 else None
    return elapsed_error(lambda: torchext._C.attach_dear(backend, parameters, names, False, make_lane=make_lane))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("shape", "parameters[0] is weight, Float[4, 4] on rank 0 and weight, Float[5, 4] on rank 1"),
        ("bucket_mb", "bucket_mb is 1 on rank 0 and 2 on rank 1"),
        ("transport", "transport by collectives is False on rank 0 and True on rank 1"),
        ("frozen", "parameters[1] is bias, Float[4] on rank 0 and bias (frozen), Float[4] on rank 1"),
        ("names", "parameters[0] is weight0, Float[4, 4] on rank 0 and weight1, Float[4, 4] on rank 1"),
    ],
)
def test_ranks_that_attach_something_else(what: str, text: str) -> None:
    for kind, message, seconds in run_ranks(body_disagree, 3, what):
        assert kind == "DistBackendError" and text in message, (kind, message)
        assert seconds < 10


def body_misuse(rank: Rank, misuse: Callable[[Pair], None]) -> tuple[str, str, float]:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd).run(2)
    return elapsed_error(lambda: misuse(pair))


def add_parameters(pair: Pair) -> None:
    pair.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    pair.step()


def move_memory(pair: Pair) -> None:
    pair.sync.wait()
    pair.module[0].weight.data = pair.module[0].weight.data.clone()
    pair.step()


def step_inside_averaged(pair: Pair) -> None:
    with pair.sync.averaged():
        pair.step()


def assign_a_gradient(pair: Pair) -> None:
    pair.optimizer.param_groups[0]["params"][0].grad = torch.zeros(1)


def train_in_join(pair: Pair) -> None:
    with pair.ddp.join():
        pair.step()


@pytest.mark.parametrize(
    ("misuse", "kind", "text"),
    [
        (train_in_join, "RuntimeError", r"join\(\) is not supported"),
        (add_parameters, "ValueError", "given a parameter after torchext.attach"),
        (move_memory, "RuntimeError", "0.weight has been given other memory"),
        (step_inside_averaged, "RuntimeError", r"optimizer.step\(\) inside averaged"),
        (assign_a_gradient, "RuntimeError", "change them in place"),
    ],
)
def test_misuse(misuse: Callable[[Pair], None], kind: str, text: str) -> None:
    import re

    for got, message, seconds in run_ranks(body_misuse, 2, misuse):
        assert got == kind and re.search(text, message), (got, message)
        assert seconds < 10


def body_gradients_on_some_ranks(rank: Rank) -> tuple[str, str, float]:
    rank.init("dear")
    pair = Pair(rank, made(Branches), sgd, bucket_mb=0.001)
    pair.module.choice = rank.rank

    def train() -> None:
        pair.losses()[0].backward()
        pair.optimizer.step()

    return elapsed_error(train)


def test_gradients_on_some_ranks_only() -> None:
    """Without find_unused_parameters: the rank that lacks one says so, the others hear it; nobody hangs."""
    for kind, message, seconds in run_ranks(body_gradients_on_some_ranks, 2):
        assert kind == "DistBackendError", (kind, message)
        assert "no gradient for" in message and "find_unused_parameters=True" in message, message
        assert seconds < 10


def body_optimizers_that_are_not_copied(rank: Rank, fallback: bool) -> bool:
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw, fallback=fallback).run(2)
    for made_of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an attached optimizer cannot be copied or pickled"):
            made_of(pair.optimizer)
    pair.run(2)
    assert pair.difference() < 1e-5
    pair.sync.detach()
    copied = copy.deepcopy(pair.optimizer)
    return copied.state_dict()["state"].keys() == pair.plain.state_dict()["state"].keys()


@pytest.mark.parametrize("fallback", [False, True])  # the first steps are plain all-reduce, and no exception
@pytest.mark.parametrize("form", FORMS)
def test_an_attached_optimizer_is_not_copied_and_a_detached_one_is(form: str, fallback: bool) -> None:
    assert run_ranks(in_form, 2, form, body_optimizers_that_are_not_copied, fallback) == [True, True]


def body_checkpoint_functions(rank: Rank, fallback: bool) -> float:
    from torch.distributed.checkpoint import state_dict as functions

    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw, fallback=fallback)
    state = functions.get_optimizer_state_dict(pair.twin, adamw(pair.twin.parameters()))
    text = r"get_state_dict\(\) and set_state_dict\(\) do not find .* save sync\.optimizer_state_dict\(\)"
    with pytest.raises(RuntimeError, match=text):
        functions.set_optimizer_state_dict(pair.ddp, pair.optimizer, state)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            functions.get_state_dict(pair.ddp, pair.optimizer)
        pair.run(2)
    assert functions.get_model_state_dict(pair.ddp).keys() == pair.module.state_dict().keys()
    worst = pair.done()
    assert functions.get_optimizer_state_dict(pair.module, pair.optimizer).keys() == state.keys()
    return worst


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_functions_that_look_for_parameters_in_the_optimizer(form: str, fallback: bool) -> None:
    assert max(run_ranks(in_form, 2, form, body_checkpoint_functions, fallback)) < 1e-5


def _without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


def body_damaged_state(rank: Rank, fallback: bool) -> list[str]:
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw, fallback=fallback)
    trained = Pair(rank, made(mlp), adamw, fallback=fallback).run(3)
    good = trained.sync.optimizer_state_dict()
    damaged: list[tuple[Any, str]] = [
        (3, "is of type int, must be a mapping"),
        ({**good, "step": 1}, "has the key 'step', must be"),
        ({**good, "x.step": 1}, "has the key 'x.step', must be"),
        ({**good, 7: 1}, "has the key 7, must be"),
        ({**good, "99.step": torch.tensor(1.0)}, "'99.step': the parameters stepped are 0, 1, 2, 3, 4, 5;"),
        ({**good, "0.momentum": torch.tensor(1.0)}, "'0.momentum': this optimizer keeps step, exp_avg, exp_avg_sq"),
        (_without(good, "0.exp_avg"), "lacks '0.exp_avg'"),
        ({**good, "0.exp_avg": torch.zeros(3)}, r"'0.exp_avg' is a tensor of shape \[3\] and .* must be a tensor of"),
        ({**good, "0.step": torch.zeros(2)}, r"'0.step' is a tensor of shape \[2\] .* shape \[\] and torch.float32"),
        ({**good, "0.exp_avg": good["0.exp_avg"].double()}, "'0.exp_avg' .* torch.float64 on this rank"),
        ({**good, "0.exp_avg": None}, "'0.exp_avg' is of type NoneType"),
    ]
    for runs in range(2):  # before there is any state, and after
        pair.run(runs * 3)
        before = {key: copy.copy(value) for key, value in pair.sync.optimizer_state_dict().items()}
        for state, text in damaged:
            with pytest.raises((TypeError, ValueError), match=text):
                pair.sync.load_optimizer_state_dict(state)
        with pytest.raises(ValueError if rank.rank else RuntimeError, match="lacks" if rank.rank else "rank 4 could"):
            pair.sync.load_optimizer_state_dict(_without(good, "0.exp_avg") if rank.rank else good)
        none = {key: value for key, value in good.items() if not key.startswith("1.")}
        with pytest.raises(ValueError, match="different keys"):
            pair.sync.load_optimizer_state_dict(none if rank.rank else good)
        after = pair.sync.optimizer_state_dict()
        assert after.keys() == before.keys()
        for key, value in before.items():
            assert torch.equal(*(v.to_local() if hasattr(v, "to_local") else v for v in (value, after[key])))
    assert pair.difference() < 1e-5
    pair.sync.load_optimizer_state_dict(good)
    return sorted(good)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_optimizer_state_is_refused_on_all_ranks(form: str, fallback: bool) -> None:
    keys = run_ranks(in_form, 5, form, body_damaged_state, fallback)  # one has nothing of the last bias
    assert all(of_rank == keys[0] for of_rank in keys)


def body_state_on_rank_0(rank: Rank) -> tuple[str, str, float] | None:
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw, timeout=5).run(2)
    if rank.rank > 0:
        rank.pause()
        return None
    return elapsed_error(pair.optimizer.state_dict)


def test_optimizer_state_on_rank_0_alone_is_an_error_that_says_why() -> None:
    with launch(body_state_on_rank_0, 3) as ranks:
        outcome = ranks.outcomes([0], deadline=40)[0]
        assert outcome.ok, outcome.trace
        kind, message, seconds = outcome.value
        assert "state_dict() is collective" in message, (kind, message)
        assert seconds < 20
        ranks.proceed([1, 2])
