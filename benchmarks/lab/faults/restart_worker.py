"""A worker of ``restart.py``: trains a few steps with a checkpoint after each, and writes down when it got how far.

    torchrun ... -m lab.faults.restart_worker FOLDER BACKEND STEPS VICTIM_STEP

Times are of the machine's monotonic clock. Rank 1 kills itself before step VICTIM_STEP of the first attempt.
"""

from __future__ import annotations

import time

BEGIN = time.monotonic()  # before the imports, which are most of a start

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext


def main() -> None:
    """Trains; leaves ``ATTEMPT-RANK.json`` with the times, and ``weights.pt`` at the end."""
    folder, backend, steps, victim_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    times = {"begin": BEGIN, "imported": time.monotonic()}
    notes, saved = folder / f"{attempt}-{rank}.json", folder / "checkpoint.pt"
    dist.init_process_group(backend, timeout=timedelta(seconds=15))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    if saved.exists():
        kept = torch.load(saved, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    if backend != "gloo":
        torchext.attach(model, optimizer)
    times["ready"] = time.monotonic()
    while step < steps:
        if attempt == "0" and rank == 1 and step == victim_step:
            notes.write_text(json.dumps(times | {"killed": time.monotonic()}))
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(2 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        step += 1
        if "step" not in times:
            times["step"] = time.monotonic()
            notes.write_text(json.dumps(times))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if rank == 0:
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        dist.barrier()
    weights = [parameter.detach().clone() for parameter in model.module.state_dict().values()]
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
