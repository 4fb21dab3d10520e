"""What DDP was told to ignore is each worker's own: not averaged, and stepped with its own gradient."""

from __future__ import annotations

import copy
from typing import Any

import torch
from attached import batch, equal_everywhere, everywhere, flat, new_group
from harness import Rank
from rows import row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("prague", {"order": "cta", "generator": "static"}),
    ("prague", {"order": "atc", "generator": "static"}),
    ("dssync", {}),
    ("hop", {"graph": "ring"}),
    ("dear", {"allreduce_fallback": False, "form": "sharded"}),
    ("dear", {"allreduce_fallback": False, "form": "replicated"}),
    ("dear", {"allreduce_fallback": True}),
]


class Personal(nn.Module):
    """A body that is shared; a head, its statistics and a frozen factor that are the worker's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)
        torch.manual_seed(1 + rank)
        self.own = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.own.register_parameter("factor", nn.Parameter(torch.full((1,), 1.0 + rank), requires_grad=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.shared = torch.tanh(self.body(inputs))
        return self.judged(self.shared)

    def judged(self, shared: torch.Tensor) -> torch.Tensor:
        return self.own(shared) * self.own.factor  # type: ignore[no-any-return]


def body_own(rank: Rank, backend: str, options: dict[str, Any]) -> None:
    rank.init(backend)
    model = Personal(rank.rank)
    ignored = [name for name in model.state_dict() if name.startswith("own.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model, process_group=new_group(backend, **options))
    twin = copy.deepcopy(model)  # its own part is trained on what the model's body makes
    own = torch.optim.SGD(model.own.parameters(), lr=0.1, momentum=0.9)
    optimizers = [torch.optim.SGD(model.body.parameters(), lr=0.1), own]
    if backend != "dear":
        optimizers[0].add_param_group({**own.param_groups[0], "params": list(model.own.parameters())})
        del optimizers[1]
    sync = torchext.attach(ddp, optimizers[0])
    plain = torch.optim.SGD(twin.own.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for step in range(6):
            inputs, targets = batch(rank.rank, step)
            for module in (ddp, twin):
                module.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            nn.functional.mse_loss(twin.judged(model.shared.detach()), targets).backward()
            for optimizer in (*optimizers, plain):
                optimizer.step()

    def check() -> None:
        for name, value in twin.own.state_dict().items():
            torch.testing.assert_close(model.own.state_dict()[name], value, rtol=0, atol=0, msg=name)
        for mine, its in zip(model.own.parameters(), twin.own.parameters(), strict=True):
            state, expected = optimizers[-1].state.get(mine, {}), plain.state.get(its, {})
            torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)

    train()
    with sync.averaged():
        equal_everywhere(model.body)
        check()
    check()
    sync.synchronize()
    equal_everywhere(model.body)
    assert not torch.equal(flat(model.body), flat(twin.body))
    check()
    for module in (model, twin):  # nobody else has to know
        module.own.factor.requires_grad_(True)
    train()
    check()
    assert not torch.equal(*everywhere(flat(model.own))[:2])
    sync.synchronize()
    sync.detach()
    equal_everywhere(model.body)
    check()


def test_what_is_ignored_is_the_workers_own() -> None:
    row_values(body_own, 2, {f"{backend} {options}": (backend, options) for backend, options in VARIANTS})
