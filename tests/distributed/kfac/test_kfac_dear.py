"""K-FAC on models of "dear": in front of an optimizer that steps."""

from __future__ import annotations

import torch
from attached import flat, new_group
from harness import Rank
from kfac_net import Net, train, whole_batch
from largest import largest
from rows import values_in_one_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.optim import KFACPreconditioner


def body_with_dear(rank: Rank, fallback: bool, first: bool) -> tuple[float, float]:
    """In front of an optimizer that "dear" makes step: the directions are clipped by its learning rates."""
    dear = new_group("dear", form="replicated", allreduce_fallback=fallback, bucket_mb=0.001)
    flats, clips = [], []
    for group in (dear, None):
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        options = {"kl_clip": 1e-5, "inverse_update_steps": 2, "strategy": "spd"}
        kfac = KFACPreconditioner(model, optimizer, **options) if first or group is None else None
        sync = torchext.attach(model, optimizer) if group else None
        kfac = kfac or KFACPreconditioner(model, optimizer, **options)
        train(model, optimizer, 6, rank=rank.rank, size=rank.size)
        if sync is not None:
            assert sync.stats()["mode"] == ("allreduce" if fallback else "dear")
            sync.wait()
        flats.append(flat(model.module))
        clips.append(kfac.stats()["clip"])
    assert clips[1] < 1
    return float((flats[0] - flats[1]).abs().max()), abs(clips[0] / clips[1] - 1)


def test_in_front_of_an_optimizer_of_dear() -> None:
    ways = [(fallback, first) for fallback in (False, True) for first in (False, True)]
    cases = {f"fallback {way[0]}, first {way[1]}": (body_with_dear, *way) for way in ways}
    for name, values in values_in_one_group(cases, 2).items():
        assert all(difference < 1e-9 and clip < 1e-9 for difference, clip in values), (name, values)


def body_by_hand(rank: Rank, given: bool) -> float:
    """step() called by hand in front of an optimizer of dear; ``given``: with its param groups."""
    dear = new_group("dear", form="replicated", allreduce_fallback=False, bucket_mb=0.001)
    weights = []
    for group in (dear, None):
        model = DistributedDataParallel(Net(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFACPreconditioner(model, strategy="spd", kl_clip=None, inverse_update_steps=1)
        sync = torchext.attach(model, optimizer) if group else None
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


def test_a_step_by_hand_takes_averaged_gradients() -> None:
    cases = {f"param groups {given}": (body_by_hand, given) for given in (False, True)}
    for name, differences in values_in_one_group(cases, 2).items():
        assert largest(differences) < 1e-12, name
