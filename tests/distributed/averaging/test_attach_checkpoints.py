"""torch.distributed.checkpoint of a model whose replicas differ: saved as their average, by all workers together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attached import Normalized, batch, equal_everywhere, everywhere, flat, new_group
from harness import Rank, run_ranks
from rows import row
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import torchext


def attached(group: dist.ProcessGroup) -> tuple[DistributedDataParallel, torch.optim.Optimizer, torchext.Synchronizer]:
    ddp = DistributedDataParallel(Normalized(), process_group=group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    return ddp, optimizer, torchext.attach(ddp, optimizer)


def train(rank: Rank, ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        inputs, targets = batch(rank.rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.items()}


def check(rank: Rank, backend: str, path: str) -> None:
    group = new_group(backend)
    ddp, optimizer, sync = attached(group)
    train(rank, ddp, optimizer, 5)
    replicas = everywhere(flat(ddp))
    assert (replicas - replicas[0]).abs().max() > 0  # else nothing is shown here
    means = [everywhere(optimizer.state[parameter]["exp_avg"]).mean(0) for parameter in ddp.parameters()]
    with sync.averaged() as module:
        saved = tensors(module.state_dict())
        model_state, optimizer_state = get_state_dict(ddp, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    sync.detach()

    # Another run: attached first, its optimizer has no state yet.
    other, other_optimizer, other_sync = attached(group)
    other_sync.synchronize()
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for key, value in other.module.state_dict().items():
        assert torch.equal(value, saved[key]), key
    equal_everywhere(other.module)
    for parameter, mean in zip(other.parameters(), means, strict=True):
        state = other_optimizer.state[parameter]
        assert state["step"] == 5
        torch.testing.assert_close(state["exp_avg"], mean, rtol=1e-5, atol=1e-7)
    train(rank, other, other_optimizer, 5)
    other_sync.synchronize()
    equal_everywhere(other.module)
    other_sync.detach()


def body(rank: Rank, folder: Path) -> None:
    rank.init()
    for backend in ("prague", "dssync", "hop"):
        with row(backend):
            check(rank, backend, str(folder / backend))


def test_saved_inside_averaged_and_loaded_by_another_run(tmp_path: Path) -> None:
    run_ranks(body, 3, tmp_path)
