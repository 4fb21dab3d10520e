"""Under a default device that has no data: nothing of torchext's own is made there."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from beside_ddp import ATTACHED, DEAR, Script, check_rows_apart
from torch import nn


def trained(script: Script, form: str) -> torch.Tensor:
    """Steps, clipping, evaluation, saving and loading; the default device is another one all along."""
    model = nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Linear(40, 4)).double()
    batches = [script.inputs().double() for _ in range(8)]
    torch.set_default_device("meta")
    try:
        script.wrap(model, broadcast_buffers=False)
        exact = form not in DEAR  # averaging replicas is plain DDP where steps are linear
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if exact
            else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        script.attach(optimizer)
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            script.ddp(batch).square().mean().backward()
            if not exact:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if number == 4 and script.sync is not None:
                script.sync.synchronize()
                with script.sync.averaged():
                    state = copy.deepcopy(optimizer.state_dict())
                    torch.save([model.state_dict(), state], io.BytesIO())
                optimizer.load_state_dict(state if not exact else optimizer.state_dict())
        if script.sync is not None:
            script.sync.synchronize()
            script.sync.detach()
            script.sync = None
    finally:
        torch.set_default_device("cpu")
    return script.result()


@pytest.mark.filterwarnings("ignore::torchext.errors.ReplicaWarning")
def test_beside_plain_ddp() -> None:
    check_rows_apart({form: (form, trained, form) for form in ATTACHED}, limit=1e-9)
