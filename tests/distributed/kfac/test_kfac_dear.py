"""K-FAC on models of "dear": in front of an optimizer; and what cannot train together is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from attached import flat
from harness import Rank, run_ranks
from kfac_net import Net, train, whole_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.optim import PADKFAC, SPDKFAC, KFACPreconditioner

WAY = r"put KFACPreconditioner\(model, optimizer\) in front of .* DeAROptions\(form='replicated'\), or .* plain DDP"


def body_with_dear(rank: Rank, fallback: bool, first: bool) -> tuple[float, float]:
    """In front of an optimizer that "dear" makes step: the directions are clipped by its learning rates."""
    rank.init("dear", pg_options=torchext.DeAROptions(form="replicated", allreduce_fallback=fallback, bucket_mb=0.001))
    flats, clips = [], []
    for group in (None, dist.new_group(backend="gloo")):
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        options = {"kl_clip": 1e-5, "inverse_update_steps": 2, "strategy": "spd"}
        kfac = KFACPreconditioner(model, optimizer, **options) if first or group else None
        sync = None if group else torchext.attach(model, optimizer)
        kfac = kfac or KFACPreconditioner(model, optimizer, **options)
        train(model, optimizer, 6, rank=rank.rank, size=rank.size)
        if sync is not None:
            assert sync.stats()["mode"] == ("allreduce" if fallback else "dear")
            sync.wait()
        flats.append(flat(model.module))
        clips.append(kfac.stats()["clip"])
    assert clips[1] < 1
    return float((flats[0] - flats[1]).abs().max()), abs(clips[0] / clips[1] - 1)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("fallback", [False, True])
def test_in_front_of_an_optimizer_of_dear(fallback: bool, first: bool) -> None:
    for difference, clip in run_ranks(body_with_dear, 2, fallback, first):
        assert difference < 1e-9 and clip < 1e-9


def body_refused(rank: Rank, form: str) -> bool:
    rank.init("dear", pg_options=torchext.DeAROptions(form=form, bucket_mb=0.001))
    model = DistributedDataParallel(Net())
    options = {"strategy": "spd", "inverse_update_steps": 2}
    for kind in (SPDKFAC, PADKFAC):
        optimizer = kind(model)
        error = TypeError if form == "replicated" else ValueError
        with pytest.raises(error, match=rf"^{kind.__name__} under dear.*{WAY}"):
            torchext.attach(model, optimizer)
        optimizer.kfac.remove()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    if form == "sharded":
        for in_front in (plain, None):
            kfac = KFACPreconditioner(model, in_front, **options)
            with pytest.raises(ValueError, match=rf"^KFACPreconditioner under dear in the sharded form.*{WAY}"):
                torchext.attach(model, plain)
            kfac.remove()
    sync = torchext.attach(model, plain)
    # Attached first, which is no other thing; all ranks raise their own error.
    with pytest.raises(TypeError if form == "replicated" else ValueError, match=rf"^SPDKFAC under dear.*{WAY}"):
        SPDKFAC(model)
    if form == "sharded":
        for in_front in (plain, None):
            with pytest.raises(ValueError, match=rf"^KFACPreconditioner under dear in the sharded form.*{WAY}"):
                KFACPreconditioner(model, in_front, **options)
    sync.detach()
    KFACPreconditioner(model, plain, **options).remove()
    return True


@pytest.mark.parametrize("form", ["replicated", "sharded"])
def test_what_dear_cannot_step_is_refused(form: str) -> None:
    assert run_ranks(body_refused, 2, form) == [True, True]


def body_by_hand(rank: Rank, given: bool) -> float:
    """step() called by hand in front of an optimizer of dear; ``given``: with its param groups."""
    options = torchext.DeAROptions(form="replicated", allreduce_fallback=False, bucket_mb=0.001)
    rank.init("dear", pg_options=options)
    weights = []
    for group in (None, dist.new_group(backend="gloo")):
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFACPreconditioner(model, strategy="spd", kl_clip=None, inverse_update_steps=1)
        sync = None if group else torchext.attach(model, optimizer)
        for step in range(3):
            image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(image, token), target).backward()
            if given:
                kfac.step(optimizer.param_groups)
            else:
                kfac.step(lr=0.1)
            optimizer.step()
        if sync is not None:
            sync.wait()
        weights.append(torch.cat([p.detach().flatten() for p in model.module.parameters()]))
    return float((weights[0] - weights[1]).abs().max())


@pytest.mark.parametrize("given", [False, True])
def test_a_step_by_hand_takes_averaged_gradients(given: bool) -> None:
    assert max(run_ranks(body_by_hand, 2, given)) < 1e-12
