"""A script on plain DDP over Gloo that knows nothing of torchext; several trainings of the shapes that people write."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reporting import is_average, numbers, report, spread
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)


def make(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)), **options)


def backward(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = data(step)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def train(
    model: Any,
    optimizers: list[torch.optim.Optimizer],
    *,
    closure: bool = False,
    accumulate: int = 1,
    clip: bool = False,
) -> dict[str, Any]:
    losses = []

    def passes(step: int) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(accumulate):
            last = part == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = backward(model, accumulate * step + part)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    for step in range(STEPS):
        if closure:
            losses.append(optimizers[0].step(functools.partial(passes, step)))
            continue
        losses.append(passes(step))
        for optimizer in optimizers:
            optimizer.step()
    attached = getattr(model, "_torchext_synchronizer", None)
    steps = None if attached is None else attached.stats()["steps"]
    if attached is not None:
        attached.detach()
    return {"losses": [float(loss) for loss in losses], "model": numbers(model.module), "steps": steps}


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def validated_first() -> dict[str, Any]:
    """A look at the untrained model; its wrapper stays in eval mode, as Lightning's does."""
    model = make()
    optimizers = sgd(model)
    model.eval()
    with torch.no_grad():
        model(data(0)[0])
    model.module.train()
    return train(model, optimizers)


def divided() -> dict[str, Any]:
    model = make()
    halves = [torch.optim.SGD(model.module[0].parameters(), lr=0.1), torch.optim.AdamW(model.module[2].parameters())]
    return train(model, halves)


def refused() -> dict[str, Any]:
    """dear does not take an optimizer that has a parameter of something else."""
    model, another = make(), nn.Parameter(torch.ones(2))
    return train(model, [torch.optim.SGD([*model.parameters(), another], lr=0.1)])


def beside() -> dict[str, Any]:
    """Over a group of new_group()."""
    group = dist.new_group()
    model = make(process_group=group)
    return {**train(model, sgd(model)), "group": dist.get_backend(group)}


def remade() -> dict[str, Any]:
    """The first optimizer is gone when training begins."""
    model = make()
    optimizers = sgd(model)
    optimizers[0].itself = optimizers  # type: ignore[attr-defined]  # a cycle
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01)]
    return train(model, optimizers)


def saved() -> dict[str, Any]:
    """Rank 0 saves alone and all evaluate: between barriers, and behind one."""
    model = make()
    optimizer = sgd(model)[0]

    def look() -> list[str]:
        """What is warned of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if dist.get_rank() == 0:
                model.state_dict()
                optimizer.state_dict()
            model.eval()
            with torch.no_grad():
                model(data(0)[0])
            model.train()
        return [str(warning.message) for warning in caught]

    told: dict[str, Any] = {}
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(backward(model, step)))
        if step == 4:
            dist.barrier()  # between the passes and the step
        optimizer.step()
        if step == 2:
            told["between"] = look()
            own = {name: value.clone() for name, value in model.module.state_dict().items()}
            told["apart"] = spread(own)
            dist.barrier()
            told["behind"] = look()
            told["distance"] = is_average(model.module.state_dict(), own)
            told["spread"] = spread(model.module.state_dict())
    attached = getattr(model, "_torchext_synchronizer", None)
    steps = None if attached is None else attached.stats()["steps"]
    if attached is not None:
        attached.detach()
    return {"losses": losses, "model": numbers(model.module), "steps": steps, **told}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: train(model := make(), sgd(model)),
    "closure": lambda: train(model := make(), sgd(model), closure=True),
    "accumulated": lambda: train(model := make(), sgd(model), accumulate=2, clip=True),
    "validated first": validated_first,
    "divided": divided,
    "refused": refused,
    "beside": beside,
    "remade": remade,
    "saved": saved,
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend=sys.argv[2] if len(sys.argv) > 2 else "gloo")
    report(backend=dist.get_backend(), arguments=sys.argv[1:])
    for name in sys.argv[1].split(",") if len(sys.argv) > 1 else CASES:
        report(**{name: CASES[name]()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
