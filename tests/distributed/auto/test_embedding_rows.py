"""Training with embeddings whose rows travel is training with plain DDP, and a wait for rows can be interrupted."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, launch, run_ranks
from largest import largest
from made_plans import STEP_SECONDS, candidate, local_link
from rows_beside import EXACT, Pair, adamw, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import auto
from torchext.auto import SyncPlan
from torchext.auto.candidates import search

WORDS = 40
PADDING = 3


class Net(nn.Module):
    """Two tables, one of them with a padding index, one frozen, and a linear layer that sends rows, too."""

    names = ("words", "places", "hidden")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, 12, padding_idx=PADDING), nn.Embedding(6, 12)
        self.fixed = nn.Embedding(WORDS, 12).requires_grad_(False)
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1]).expand(tokens.shape)
        found = self.words(tokens) + self.fixed(tokens) + self.places(places)
        return self.head(torch.tanh(self.hidden(torch.tanh(found).mean(1))))

    @staticmethod
    def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(WORDS // 2, (rows, 6), generator=generator)  # some twice, some padding, some never
        return tokens, tokens[:, :3] / WORDS


def body_exact(rank: Rank) -> dict[str, float]:
    rank.init("dear")
    found = {}
    for name, optimizer in (("sgd", sgd), ("adamw", adamw)):
        pair = Pair(rank, Net, optimizer, rows=64)
        for step in range(20):
            last = step == 19 and rank.rank == 1  # an empty batch
            pair.backward(0 if last else 1 + (step + 3 * rank.rank) % 8)
            table = pair.models[0].module.words.weight.grad
            assert table is not None
            assert not table[PADDING].any()
            assert not table[WORDS // 2 :].any()
            pair.step(clip=step % 2 == 0)
        found[name] = pair.apart()
        assert pair.layers.stats()["steps"] == 20
        assert pair.layers.stats()["reductions"] == 0

    pair = Pair(rank, Net, sgd, rows=64)
    for step in range(20):
        with pair.models[0].no_sync(), pair.models[1].no_sync():
            pair.backward(2, part=1)
            pair.backward(3, part=2)
        if step % 5 == 0:  # begun anew
            pair.optimizers[0].zero_grad()
            pair.optimizers[1].zero_grad()
        # More than the places, on one rank, now and then.
        pair.backward(14 if step % 4 == 1 and rank.rank else 4)
        pair.step()
    found["no_sync"] = pair.apart()
    assert 0 < pair.layers.stats()["reductions"] < 40
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_of_embeddings_train_as_plain_ddp_does(ranks: int) -> None:
    for found in run_ranks(body_exact, ranks, deadline=180):
        assert largest(found.values()) < EXACT, found


def body_numbers(rank: Rank) -> None:
    """Wide and narrow types, narrow indices, a call twice in a pass, and what is no training."""
    rank.init("dear")
    for case in ("float64", "bfloat16", "int32", "twice"):
        models: list[Any] = []
        for by_rows in (True, False):
            dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
            model = Net().to(dtype)
            layers = auto.FactorLayers(model, Net.names, 64) if by_rows else None
            if layers is not None:
                layers.install()
            ddp = DistributedDataParallel(model)
            if layers is not None:
                layers.follow(ddp)
            tokens, _ = Net.batch(3, torch.Generator().manual_seed(rank.rank))
            tokens = tokens.to(torch.int32) if case == "int32" else tokens
            output = ddp(tokens)
            if case == "twice":
                output = output + ddp(tokens.flip(0))
            output.float().pow(2).sum().backward() if case != "float64" else output.pow(2).sum().backward()
            with torch.no_grad():
                ddp(tokens)
            models.append(model)
        limit = {"float64": 1e-12, "bfloat16": 2e-2}.get(case, EXACT)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            if b.grad is None:
                assert a.grad is None
                continue
            assert a.grad.dtype == b.dtype
            assert (a.grad - b.grad).abs().max() <= limit * b.grad.abs().max(), case
    dist.destroy_process_group()


def test_types_of_tables_and_indices() -> None:
    run_ranks(body_numbers, 2)


def body_interrupted(rank: Rank) -> float:
    """Ctrl-C while the other rank does not come."""
    rank.init("dear", timeout=60)
    pair = Pair(rank, Net, sgd, rows=64)
    pair.backward(4)
    pair.step()
    rank.report("trained")
    if rank.rank == 1:
        rank.pause()
        return 0.0
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    # Only the model with rows, of which everything but the head is: the wait is for these, after DDP's own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, interrupt).start()
    layers = pair.layers
    tokens, targets = Net.batch(4, torch.Generator().manual_seed(0))
    layers._core.expect(True)  # type: ignore[union-attr]  # without DDP's reducer, which waits where nobody looks
    module = pair.models[0].module
    with pytest.raises(KeyboardInterrupt):
        (module(tokens) - targets).pow(2).sum().backward()
    took = time.monotonic() - sent[0]
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 5
    return took


def test_a_signal_ends_the_wait_for_rows() -> None:
    with launch(body_interrupted, 2) as ranks:
        ranks.expect("trained")
        outcome = ranks.outcomes([0])[0]
        assert outcome.ok, outcome
        assert outcome.value < 0.5
        ranks.proceed([1])


def step(model: Any) -> None:
    model(Net.batch(4, torch.Generator().manual_seed(0))[0]).pow(2).mean().backward()


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))
    model[1].weight = model[0].weight
    return model


def body_plan(rank: Rank) -> tuple[float, str]:
    rank.init("gloo")
    model = Net()
    profile = auto.profile(model, step, steps=1)
    (table,) = (parameter for parameter in profile.parameters if parameter.name == "words.weight")
    assert (table.kind, table.rows) == ("embedding", 24)
    link = local_link(rank.size)
    link = dataclasses.replace(link, tables=link.tables | {"rows": link.tables["all_gather"]})
    wide = [dataclasses.replace(p, nbytes=10**8) if p.name == "words.weight" else p for p in profile.parameters]
    found = search(dataclasses.replace(profile, parameters=tuple(wide)), link, listed=(), allow=("exact",))
    assert "words" in next(c for c in found if c.chosen).factor_layers

    kept = [at for at, parameter in enumerate(profile.parameters) if parameter.name != "words.weight"]
    buckets = (tuple(range(len(profile.parameters))),)
    plan = SyncPlan(
        dataclasses.replace(profile, step_seconds=((STEP_SECONDS,),) * rank.size),
        local_link(rank.size),
        (
            candidate("ddp", "default", buckets),
            candidate("ddp", "program", (tuple(kept),), factor_layers=("words",), chosen=True, reason="chosen"),
        ),
        ("exact",),
        str(torch.__version__),
        "0.2.0",
    )
    # A tied table is not chosen, and the plan says why.
    refused = auto.plan(tied(), lambda own: own(torch.arange(4)).sum().backward(), link=local_link(rank.size))
    assert not any(found.factor_layers for found in refused.candidates)
    assert "not possible: the weight of '0' is shared with another layer" in refused.explain()

    optimizer = sgd(model.parameters())
    ddp, sync = plan.apply(model, optimizer)
    twin = Net()
    plain = DistributedDataParallel(twin)
    twin_optimizer = sgd(twin.parameters())
    for number in range(5):
        tokens, targets = Net.batch(4, torch.Generator().manual_seed(10 * number + rank.rank))
        for one, own in ((ddp, optimizer), (plain, twin_optimizer)):
            own.zero_grad()
            (one(tokens) - targets).pow(2).mean().backward()
            own.step()
    apart = largest(
        float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    sync.detach()
    dist.destroy_process_group()
    return apart, plan.explain()


def test_a_plan_with_rows_of_a_table_is_applied() -> None:
    for apart, text in run_ranks(body_plan, 2):
        assert apart < EXACT
        assert "DDP, 1 layer as rows, 1 bucket of" in text
