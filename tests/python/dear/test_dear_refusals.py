"""What "dear" refuses of models, optimizers and scripts by what one rank sees, with which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Rank
from sharded import Pair, adamw, made, mlp, sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torchext


class Rotating(torch.optim.Optimizer):
    """Needs whole gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


class Marked(torch.optim.SGD):
    elementwise = True


@pytest.fixture
def ddp(alone: Rank) -> DistributedDataParallel:
    alone.init("dear", pg_options=torchext.DeAROptions(form="sharded"))
    return DistributedDataParallel(made(mlp))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch.optim.LBFGS, "LBFGS steps several times"),
        (Rotating, r"Rotating.*form='replicated'.*Rotating.elementwise = True"),
    ],
)
def test_an_optimizer_that_cannot_be_sharded(ddp: DistributedDataParallel, kind: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        torchext.attach(ddp, kind(ddp.module.parameters()))


@pytest.mark.parametrize("bucket_mb", [0, -3, "small", 1e9])
def test_a_size_of_buckets_out_of_range(ddp: DistributedDataParallel, bucket_mb: Any) -> None:
    with pytest.raises(ValueError, match=r"bucket_mb must be 'auto' or in \[0.001, 4096\], got"):
        torchext.attach(ddp, adamw(ddp.module.parameters()), bucket_mb=bucket_mb)


def test_an_optimizer_of_other_parameters(ddp: DistributedDataParallel) -> None:
    own = list(ddp.module.parameters())
    with pytest.raises(ValueError, match="does not own 2 of the model's trainable parameters"):
        torchext.attach(ddp, adamw(own[2:]))
    with pytest.raises(ValueError, match="owns 1 parameters that are not the model's"):
        torchext.attach(ddp, adamw([*own, nn.Parameter(torch.zeros(2))]))


def test_a_communication_hook_before_attach(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(ValueError, match="has a communication hook"):
        torchext.attach(ddp, adamw(ddp.parameters()))


def test_an_attached_model(ddp: DistributedDataParallel) -> None:
    sync = torchext.attach(ddp, Marked(ddp.module.parameters(), lr=0.1), bucket_mb=1)
    with pytest.raises(RuntimeError, match="attached already"):
        torchext.attach(ddp, adamw(ddp.module.parameters()))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(RuntimeError, match="communication hook"):
        ddp(torch.zeros(1, 16))
    sync.detach()
    with pytest.raises(RuntimeError, match="after detach"):
        sync.synchronize()


def add_parameters(pair: Pair) -> None:
    pair.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    pair.step()


def change_type(pair: Pair) -> None:
    pair.zero_grad()
    pair.module[0].weight.data = pair.module[0].weight.data.double()
    pair.optimizer.step()


def step_inside_averaged(pair: Pair) -> None:
    with pair.sync.averaged():
        pair.step()


def train_in_join(pair: Pair) -> None:
    with pair.ddp.join():
        pair.step()


@pytest.mark.parametrize(
    ("misuse", "kind", "text"),
    [
        (train_in_join, RuntimeError, r"join\(\) is not supported"),
        (add_parameters, ValueError, "given a parameter after torchext.attach"),
        (change_type, RuntimeError, "0.weight has become torch.DoubleTensor"),
        (step_inside_averaged, RuntimeError, r"optimizer.step\(\) inside averaged"),
    ],
)
def test_misuse(joined: Rank, misuse: Callable[[Pair], None], kind: type[Exception], text: str) -> None:
    pair = Pair(joined, made(mlp), sgd).run(2)
    with pytest.raises(kind, match=text):
        misuse(pair)


def test_state_to_load_into_of_an_optimizer_that_is_not_torchs(joined: Rank) -> None:
    pair = Pair(joined, made(mlp), lambda parameters: Marked(parameters, lr=0.1, momentum=0.9))
    with pytest.raises(RuntimeError, match=r"Marked has no state yet.*take a step"):
        pair.sync.optimizer_state_dict()
    assert pair.run(1).sync.optimizer_state_dict()
