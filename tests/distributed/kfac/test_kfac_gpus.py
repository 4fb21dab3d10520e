"""Distributed K-FAC of models on GPUs is one process on the CPU with the whole batch."""

from __future__ import annotations

import torch
from attached import flat
from gpus import NO_GPU, nccl_can, take_gpu
from harness import Rank, run_ranks
from kfac_net import EXACT, OPTIONS, Net, train, whole_batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC

pytestmark = NO_GPU
STEPS = 8
METHODS = ("inverse", "eigen")


def trained(rank: Rank, device: torch.device, method: str) -> dict[str, Tensor]:
    found = {}
    for strategy in EXACT:
        module = Net().to(device)
        model = DistributedDataParallel(module, device_ids=[device])
        optimizer = KFAC(model, strategy=strategy, method=method, **OPTIONS)
        for step in range(STEPS):
            image, token, target = (part.chunk(rank.size)[rank.rank].to(device) for part in whole_batch(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(image, token), target).backward()
            optimizer.step()
        found[strategy] = flat(module).cpu()
    return found


def body(rank: Rank) -> dict[str, dict[str, Tensor]]:
    device = take_gpu(rank)
    rank.init("nccl" if nccl_can(rank.size) else "gloo")
    return {method: trained(rank, device, method) for method in METHODS}


def test_every_exact_strategy() -> None:
    outcomes = run_ranks(body, 2)
    for method in METHODS:
        model = Net()
        train(model, KFAC(model, method=method, **OPTIONS), STEPS)
        first, second = (outcome[method] for outcome in outcomes)
        for strategy in EXACT:
            assert torch.equal(first[strategy], second[strategy]), (method, strategy)
            torch.testing.assert_close(first[strategy], flat(model), rtol=1e-6, atol=1e-6)
