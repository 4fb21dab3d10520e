"""Distributed K-FAC of models on GPUs is one process on the CPU with the whole batch."""

from __future__ import annotations

import pytest
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


def body(rank: Rank, method: str) -> dict[str, Tensor]:
    device = take_gpu(rank)
    rank.init("nccl" if nccl_can(rank.size) else "gloo")
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


@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_every_exact_strategy(method: str) -> None:
    model = Net()
    train(model, KFAC(model, method=method, **OPTIONS), STEPS)
    outcomes = run_ranks(body, 2, method)
    for strategy in EXACT:
        assert torch.equal(outcomes[0][strategy], outcomes[1][strategy]), strategy
        torch.testing.assert_close(outcomes[0][strategy], flat(model), rtol=1e-6, atol=1e-6)
