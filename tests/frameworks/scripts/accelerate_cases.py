"""Training with Accelerate. Under torchext.run it knows nothing of torchext; else its argument names the backends."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from reporting import begin, is_average, numbers, report, spread
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(folder: str, accelerator: Accelerator, attach: bool) -> dict[str, Any]:
    torch.manual_seed(2)
    # A bias in front of the BatchNorm would have rounding errors for gradients, which AdamW makes large.
    net: Any = nn.Sequential(nn.Linear(5, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.03)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    inputs = torch.randn(96, 5, generator=torch.Generator().manual_seed(4))
    loader: Any = DataLoader(TensorDataset(inputs, inputs[:, :2].cos()), batch_size=4, shuffle=False)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    if attach:
        from torchext.integrations.accelerate import attach as attach_prepared

        attach_prepared(accelerator, net)
    losses: list[float] = []
    norms: list[float] = []
    distances: list[float] = []
    apart: list[float] = []
    after: list[float] = []
    for epoch in range(2):
        for batch, target in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(batch), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
        own = {name: value.detach().clone() for name, value in accelerator.unwrap_model(net).named_parameters()}
        accelerator.save_state(f"{folder}/{epoch}")
        accelerator.save_model(net, f"{folder}/model {epoch}")
        apart.append(spread(own))  # and all ranks have come
        distances.append(is_average(load_file(f"{folder}/{epoch}/model.safetensors"), own))
        distances.append(is_average(load_file(f"{folder}/model {epoch}/model.safetensors"), own))
        after.append(spread(dict(accelerator.unwrap_model(net).named_parameters())))
    # As Accelerate's documentation has it: all ranks wait, and rank 0 saves alone.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(net).state_dict(), f"{folder}/alone.bin")
        accelerator.save_model(net, f"{folder}/alone")
    spread(own)
    distances.append(is_average(torch.load(f"{folder}/alone.bin"), own))
    distances.append(is_average(load_file(f"{folder}/alone/model.safetensors"), own))
    attached = getattr(net, "_torchext_synchronizer", None)
    told = {"steps": None if attached is None else attached.stats()["steps"], "losses": losses, "norms": norms}
    if attached is not None:
        attached.synchronize()
        attached.detach()
    moments = torch.load(f"{folder}/1/optimizer.bin", weights_only=False)["state"]
    return {
        **told,
        "saved": distances,
        "apart": apart,
        "after": after,
        "model": numbers(net),
        "spread": spread(dict(net.named_parameters())),
        "optimizer": [float(state["exp_avg"].double().sum()) for state in moments.values()],
        "backend": dist.get_backend(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1].split(",") if len(sys.argv) > 1 else ["untouched"]:
        if name != "untouched":
            begin(name, initialize=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        folder = name.replace(" ", "-")
        report(**{name: train(folder, accelerator, attach=name != "untouched")})
        dist.destroy_process_group()
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
