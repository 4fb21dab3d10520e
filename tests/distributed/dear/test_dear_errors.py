"""What "dear" says when ranks disagree, die, or end their group; what one rank sees is in tests/python/dear."""

from __future__ import annotations

import copy
import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, launch, run_ranks
from sharded import FORMS, PHASES, Branches, Pair, adamw, difference, in_form, made, mlp, sgd
from torch import nn

import torchext

pytestmark = pytest.mark.sanitize


def body_sparse(rank: Rank) -> dict[str, tuple[str, str, float]]:
    rank.init("dear")
    found = {}
    for fallback in PHASES:
        model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 4))
        pair = Pair(rank, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), fallback=fallback)
        backward = functools.partial(lambda pair: pair.ddp(torch.arange(8)).square().mean().backward(), pair)
        found[f"{fallback=}"] = elapsed_error(backward)
    return found


def test_sparse_gradients() -> None:
    for found in run_ranks(body_sparse, 2):
        for where, (kind, message, _) in found.items():
            assert kind == "TypeError", (where, kind, message)
            assert "0.weight has a Sparse gradient; make it dense" in message, (where, message)


def body_after_a_death(rank: Rank) -> tuple[bool, tuple[str, str, float]]:
    """Two models: one is detached, and one used in the forward pass of a script that has given its group up."""
    rank.init("dear")
    pairs = [Pair(rank, made(mlp), adamw).run(3) for _ in range(2)]
    rank.report("ready")
    for pair in pairs:
        with pytest.raises(dist.DistBackendError, match="rank 2 died"):
            pair.run(1_000_000)
    free = is_free_once_detached(pairs[0])
    dist.destroy_process_group()
    return free, elapsed_error(lambda: pairs[1].ddp(torch.ones(2, 16)))


def is_free_once_detached(pair: Pair) -> bool:
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
def test_detach_and_a_forward_pass_after_the_death_of_a_worker(form: str) -> None:
    with launch(in_form, 3, form, body_after_a_death) as ranks:
        ranks.expect("ready")
        ranks.kill(2)
        for outcome in ranks.outcomes(deadline=40):
            assert outcome.ok, outcome.trace or outcome
            free, (kind, message, seconds) = outcome.value
            assert free
            assert kind == "DistBackendError" and "rank 2 died" in message, (kind, message)
            assert seconds < 5


def body_end_before_the_step(rank: Rank) -> dict[str, tuple[str, str, float]]:
    rank.init("dear")
    pairs = {form: Pair(rank, made(mlp), sgd, form=form).run(3) for form in FORMS}
    for pair in pairs.values():
        pair.zero_grad()
        pair.backward()
    dist.destroy_process_group()
    errors = {}
    for form, pair in pairs.items():
        parameter = pair.optimizer.param_groups[0]["params"][0]
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        errors[f"{form}, grad"] = elapsed_error(functools.partial(getattr, parameter, "grad"))
        errors[f"{form}, unscale_()"] = elapsed_error(functools.partial(scaler.unscale_, pair.optimizer))
    return errors


def test_gradients_when_the_group_has_ended() -> None:
    for errors in run_ranks(body_end_before_the_step, 2):
        for where, (kind, message, seconds) in errors.items():
            assert kind == "DistBackendError", (where, kind, message)
            assert "call optimizer.step() before" in message, (where, message)
            assert seconds < 5, where


DIFFERENCES = {
    "shape": "parameters[0] is weight, Float[4, 4] on rank 0 and weight, Float[5, 4] on rank 1",
    "bucket_mb": "bucket_mb is 1 on rank 0 and 2 on rank 1",
    "transport": "transport by collectives is False on rank 0 and True on rank 1",
    "frozen": "parameters[1] is bias, Float[4] on rank 0 and bias (frozen), Float[4] on rank 1",
    "names": "parameters[0] is weight0, Float[4, 4] on rank 0 and weight1, Float[4, 4] on rank 1",
}


def error_of_difference(rank: Rank, what: str) -> tuple[str, str, float]:
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


def body_disagree(rank: Rank) -> dict[str, tuple[str, str, float]]:
    rank.init("dear")
    return {what: error_of_difference(rank, what) for what in DIFFERENCES}


def test_ranks_that_attach_something_else() -> None:
    for errors in run_ranks(body_disagree, 3):
        for what, (kind, message, seconds) in errors.items():
            assert kind == "DistBackendError" and DIFFERENCES[what] in message, (what, kind, message)
            assert seconds < 10, what


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
