"""Rank 0 saves alone what all ranks save together: ``accelerator.save_state()`` under torchext.run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from reporting import report
from torch import nn

if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(4, 4)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    error = ""
    try:
        for step in range(6):
            net(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and accelerator.is_main_process:
                accelerator.save_state("state")
        accelerator.wait_for_everyone()
    except dist.DistBackendError as raised:
        error = str(raised)
    report(error=error)
