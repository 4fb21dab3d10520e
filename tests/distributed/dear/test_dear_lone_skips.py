"""Ranks that skip steps alone with "dear", or make several passes a step, while it compares its ways: as plain DDP."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from beside_ddp import Script
from harness import Rank, run_ranks
from largest import largest
from sharded import EXACT, Pair, made, mlp, sgd
from torch.nn.functional import cross_entropy

import torchext

pytestmark = pytest.mark.sanitize

PASSES = 160  # that average: more than all trials take, but for the longest
PARTS = {"zeroed first": 1, "zeroed behind": 1, "no_sync": 3, "two passes": 2}


def skips(rank: int, step: int, passes: int) -> bool:
    """The decisions are in the passes 2, 13, 24 ...: rank 1 skips these alone, and others; rank 0 two of its own."""
    decides = any(number % 11 == 2 for number in range(passes * step, passes * (step + 1)))
    return (decides or step % 11 == 6) if rank == 1 else step in (7, 40)


def train(script: Script, style: str) -> tuple[torch.Tensor, str]:
    """The parameters, and in which modes the steps were made."""
    ddp = script.wrap(made(mlp))
    optimizer = sgd(ddp.parameters())
    script.attach(optimizer)
    passes = 2 if style == "two passes" else 1
    modes = ""
    for step in range(PASSES // passes):
        if style != "zeroed behind":
            optimizer.zero_grad()
        for part in range(PARTS[style]):
            local = style == "no_sync" and part < PARTS[style] - 1
            with ddp.no_sync() if local else contextlib.nullcontext():
                inputs = script.inputs()
                cross_entropy(ddp(inputs), (inputs[:, 0] > 0).long()).backward()
        if not skips(script.rank, step, passes):
            optimizer.step()
            if style == "zeroed behind":
                optimizer.zero_grad()
        if script.sync is not None:
            modes += script.sync.stats()["mode"][0]
    return script.result(), modes


def body_as_ddp(rank: Rank) -> dict[str, tuple[float, str]]:
    rank.init("gloo")
    found = {}
    for style in PARTS:
        expected, _ = train(Script(rank, None), style)
        own, modes = train(Script(rank, "dear"), style)
        found[style] = float((own - expected).abs().max()), modes
    return found


def test_each_rank_has_what_it_has_with_plain_ddp() -> None:
    for found in run_ranks(body_as_ddp, 2, deadline=180):
        for style, (worst, modes) in found.items():
            assert worst < EXACT, style
            assert "ad" in modes, style
            assert "da" in modes or modes.endswith("d"), style


def body_looks_on(rank: Rank) -> float:
    """Rank 0 makes a forward pass of its own between a backward pass and its step, whatever is decided in it."""
    rank.init("dear")
    pair = Pair(rank, made(mlp), sgd, fallback=True, bucket_mb="auto", form="replicated")
    for _ in range(60):
        pair.zero_grad()
        pair.backward()
        if rank.rank == 0:
            pair.ddp(torch.ones(2, 16))
        pair.update()
    return pair.done()


def test_a_forward_pass_of_one_rank_alone_behind_a_decision() -> None:
    assert largest(run_ranks(body_looks_on, 2)) < EXACT


def body_sharded(rank: Rank) -> tuple[str, float]:
    """Rank 1 skips alone while plain all-reduce trains; from then on all make each step, and gather parameters."""
    rank.init("dear", pg_options=torchext.DeAROptions(form="sharded"))
    ddp = torch.nn.parallel.DistributedDataParallel(made(mlp))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    sync = torchext.attach(ddp, optimizer)
    modes = ""
    for step in range(60):
        optimizer.zero_grad()
        ddp(torch.rand(4, 16)).pow(2).mean().backward()
        if not (rank.rank == 1 and step in (1, 5, 9)):
            optimizer.step()
        modes += str(sync.stats()["mode"])[0]
    sync.synchronize()
    own = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    others = [torch.empty_like(own) for _ in range(rank.size)]
    dist.all_gather(others, own)
    return modes, float((others[0] - others[1]).abs().max())


def test_a_rank_that_skips_alone_before_its_optimizer_is_in_slices() -> None:
    for modes, apart in run_ranks(body_sharded, 2):
        assert "ad" in modes
        assert apart == 0.0
