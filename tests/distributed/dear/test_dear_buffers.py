"""Buffers of models that are trained by "dear": broadcast in the forward passes in which plain DDP broadcasts them."""

from __future__ import annotations

import itertools
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from attached import Normalized, batch
from harness import Rank, run_ranks
from sharded import EXACT, FORMS, PHASES, SIZES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

PASSES = ("train", "accumulate", "peek", "evaluate")


class Trained:
    """A model with buffers, by "dear" or by plain DDP over the same group."""

    def __init__(self, group: dist.ProcessGroup, attached: bool) -> None:
        self.ddp = DistributedDataParallel(Normalized(), process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.125)
        self.sync = torchext.attach(self.ddp, self.optimizer) if attached else None

    def run(self, what: str, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One forward pass, and what belongs to it; returns its output."""
        self.ddp.train(what != "evaluate")
        if what in ("peek", "evaluate"):
            with torch.no_grad():
                return self.ddp(inputs)
        if what == "accumulate":
            with self.ddp.no_sync():
                output = self.ddp(inputs)
                nn.functional.mse_loss(output, targets).backward()
            return output.detach()
        output = self.ddp(inputs)
        nn.functional.mse_loss(output, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return output.detach()


def body_passes(rank: Rank, form: str, fallback: bool) -> None:
    options = torchext.DeAROptions(form=form, allreduce_fallback=fallback, bucket_mb=0.001)
    group = dist.new_group(backend="dear", timeout=timedelta(seconds=30), pg_options=options)
    ours, plain = Trained(group, True), Trained(group, False)
    # A train pass first: DDP itself counts on one before it is evaluated.
    passes = ["train", *random.Random(9).choices(PASSES, k=40)]
    assert len(set(itertools.pairwise(passes))) == len(PASSES) ** 2  # each after each
    for step, what in enumerate(passes):
        inputs, targets = batch(rank.rank, step)
        output, expected = (model.run(what, inputs, targets) for model in (ours, plain))
        where = f"{form}, {fallback=}: pass {step}, {what} after {passes[max(0, step - 1)]}"
        for (name, one), (_, other) in zip(ours.ddp.named_buffers(), plain.ddp.named_buffers(), strict=True):
            assert torch.equal(one, other), f"{where}: {name}"
        # Three summands and more are added in another order.
        assert (output - expected).abs().max() <= (EXACT if rank.size > 2 else 0), f"{where}: {output - expected}"
    assert ours.sync is not None
    ours.sync.detach()


def body_all(rank: Rank) -> None:
    rank.init("dear")
    for form, fallback in itertools.product(FORMS, PHASES):
        body_passes(rank, form, fallback)


@pytest.mark.parametrize("size", SIZES)
def test_forward_passes_of_every_kind(size: int) -> None:
    run_ranks(body_all, size)
