"""Models, data and the ways to train that the K-FAC benchmarks compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_CLASSES = 10


class _Block(nn.Module):
    """A basic block of the ResNets for small images (He et al. 2016, section 4.2)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Identity() if inputs == width else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def _resnet(channels: int, blocks: int) -> nn.Sequential:
    """Three stages of so many blocks, 16, 32 and 64 wide: 3 blocks make ResNet-20, 1 makes ResNet-8."""
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(blocks):
            layers.append(_Block(inputs, width, stride if block == 0 else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, _CLASSES))


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, _CLASSES),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: _mlp(64, 256, 256, _CLASSES), (64,)),
    "cnn": (_cnn, (64,)),
    "wide": (lambda: _mlp(256, 1024, 1024, 1024, _CLASSES), (256,)),
    "wide8": (lambda: _mlp(*[1024] * 8, _CLASSES), (1024,)),
    "resnet8": (lambda: nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *_resnet(1, 1)), (64,)),
    "resnet20": (lambda: _resnet(3, 3), (3, 32, 32)),
}


def make_model(name: str, *, seed: int = 0) -> nn.Module:
    """Returns the model, the same on all ranks."""
    torch.manual_seed(seed)
    return MODELS[name][0]()


def make_batch(name: str, *, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns noise of the model's input shape, and labels."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(rows, *MODELS[name][1], generator=generator)
    return inputs, torch.randint(0, _CLASSES, (rows,), generator=generator)


class Peer:
    """gpauloski/kfac-pytorch in front of SGD, behind one optimizer's face."""

    def __init__(
        self, model: nn.Module, *, lr: float, inverse_update_steps: int, factor_update_steps: int, variant: str
    ) -> None:
        from kfac.enums import DistributedStrategy  # type: ignore[import-not-found]
        from kfac.preconditioner import KFACPreconditioner  # type: ignore[import-not-found]

        self._sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self._kfac = KFACPreconditioner(
            model,
            factor_update_steps=factor_update_steps,
            inv_update_steps=inverse_update_steps,
            lr=lr,
            damping=0.003,
            compute_method="inverse" if "inverse" in variant else "eigen",
            grad_worker_fraction=DistributedStrategy.MEM_OPT if "mem-opt" in variant else DistributedStrategy.COMM_OPT,
        )

    def zero_grad(self) -> None:
        self._sgd.zero_grad()

    def step(self) -> None:
        self._kfac.step()
        self._sgd.step()


def make_optimizer(
    contender: str, model: nn.Module, *, lr: float, factors: int, inverses: int, group: Any = None
) -> Any:
    """Returns ``sgd``, K-FAC with the strategy of that name, or the peer.

    Behind the strategy may stand ``/eigen``, that method, or ``/whole``, no directions made of rows.

    The peer is ``kfac-pytorch`` (its defaults: comm-opt, eigen), followed by ``/inverse``, ``/mem-opt`` or both.
    """
    if contender == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if contender.startswith("kfac-pytorch"):
        return Peer(model, lr=lr, factor_update_steps=factors, inverse_update_steps=inverses, variant=contender)
    from torchext.optim import KFAC

    strategy, _, variant = contender.partition("/")
    return KFAC(
        model,
        lr=lr,
        strategy=strategy,
        method="eigen" if variant == "eigen" else "inverse",
        gather_rows=False if variant == "whole" else None,
        factor_update_steps=factors,
        inverse_update_steps=inverses,
        process_group=group,
    )
