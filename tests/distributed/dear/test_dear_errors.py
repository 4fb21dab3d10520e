"""What "dear" refuses, with which words; what happens when ranks disagree."""

from __future__ import annotations

import copy
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

pytestmark = pytest.mark.sanitize


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"form": "split"}, r'form must be one of sharded, replicated; got "split"'),
        ({"transport": "nccl"}, r'transport must be one of auto, hierarchical, collectives; got "nccl"'),
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
    rank.init("dear", pg_options=torchext.DeAROptions(form="sharded"))
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


def body_end_after_a_death(rank: Rank) -> tuple[str, str, float]:
    """A script that gives its group up after an error, and then uses the model that was trained in it."""
    rank.init("dear")
    pair = Pair(rank, made(mlp), adamw).run(3)
    rank.report("ready")
    with pytest.raises(dist.DistBackendError, match="rank 2 died"):
        pair.run(1_000_000)
    dist.destroy_process_group()
    return elapsed_error(lambda: pair.ddp(torch.ones(2, 16)))


@pytest.mark.parametrize("form", FORMS)
def test_a_forward_pass_when_the_group_has_failed_and_ended(form: str) -> None:
    with launch(in_form, 3, form, body_end_after_a_death) as ranks:
        ranks.expect("ready")
        ranks.kill(2)
        for outcome in ranks.outcomes(deadline=40):
            assert outcome.ok, outcome.trace or outcome
            kind, message, seconds = outcome.value
            assert kind == "DistBackendError" and "rank 2 died" in message, (kind, message)
            assert seconds < 5


def body_end_before_the_step(rank: Rank) -> list[tuple[str, str, float]]:
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd).run(3)
    pair.zero_grad()
    pair.backward()
    dist.destroy_process_group()
    parameter = pair.optimizer.param_groups[0]["params"][0]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    return [elapsed_error(lambda: parameter.grad), elapsed_error(lambda: scaler.unscale_(pair.optimizer))]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_when_the_group_has_ended(form: str) -> None:
    for errors in run_ranks(in_form, 2, form, body_end_before_the_step):
        for kind, message, seconds in errors:
            assert kind == "DistBackendError" and "call optimizer.step() before" in message, (kind, message)
            assert seconds < 5


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
    make_dedicated_group = (lambda: backend) if what == "transport" and rank.rank == 1 else None
    return elapsed_error(
        lambda: torchext._C.attach_dear(backend, parameters, names, False, make_dedicated_group=make_dedicated_group)
    )


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


def change_type(pair: Pair) -> None:
    pair.zero_grad()
    pair.module[0].weight.data = pair.module[0].weight.data.double()
    pair.optimizer.step()


def step_inside_averaged(pair: Pair) -> None:
    with pair.sync.averaged():
        pair.step()


def train_in_join(pair: Pair) -> None:
    with pair.ddp.join():
        pair.step()


@pytest.mark.parametrize(
    ("misuse", "kind", "text"),
    [
        (train_in_join, "RuntimeError", r"join\(\) is not supported"),
        (add_parameters, "ValueError", "given a parameter after torchext.attach"),
        (change_type, "RuntimeError", "0.weight has become torch.DoubleTensor"),
        (step_inside_averaged, "RuntimeError", r"optimizer.step\(\) inside averaged"),
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
