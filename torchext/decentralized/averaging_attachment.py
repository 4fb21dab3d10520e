"""Attaching a model to a decentralized backend: what it cannot train, and the synchronizer of what it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of
from torchext.ddp.attach_checks import Optimizers, before_averaging, check_dense
from torchext.ddp.synchronizer import Synchronizer, ignored_parameters
from torchext.decentralized.averaged_state import AVERAGED_DTYPES
from torchext.decentralized.averaging_synchronizer import AveragingSynchronizer
from torchext.elastic.membership import Membership

__all__ = ["attach_averaging", "check_averaging"]


def check_averaging(ddp: DistributedDataParallel, optimizers: Optimizers) -> None:
    """Refuses what decentralized workers cannot train."""
    for optimizer in optimizers:
        for check in before_averaging:
            check(ddp.module, optimizer)
    if ddp._comm_hooks:
        raise ValueError(
            "torchext.attach: the model has a communication hook (register_comm_hook), and gradients of decentralized "
            "workers are not communicated; leave it out"
        )
    for name, child in ddp.module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"torchext.attach: {name!r} is a SyncBatchNorm, which needs all workers in every forward pass; "
                "decentralized workers run at their own pace. Use BatchNorm: its statistics are averaged"
            )
    ignored = ignored_parameters(ddp)
    named = [*(("parameter", *found) for found in ddp.module.named_parameters())]
    named += [("buffer", *found) for found in ddp.module.named_buffers()]
    for what, name, tensor in named:
        if id(tensor) in ignored:
            continue
        if tensor.dtype in AVERAGED_DTYPES:
            check_dense(what, name, tensor)
        elif tensor.requires_grad:
            raise TypeError(
                f"torchext.attach: {what} {name!r} is {tensor.dtype}; averaged are float32, float64, float16 and "
                "bfloat16. Convert it, freeze it before the model is wrapped, or have DDP ignore it"
            )


def attach_averaging(
    attach_core: Callable[..., Any],
    ddp: DistributedDataParallel,
    optimizers: Optimizers,
    membership: Membership | None,
    kind: type[AveragingSynchronizer] = AveragingSynchronizer,
) -> Synchronizer:
    """Attaches to a decentralized backend. attach_core: of backend and tensors to a C++ synchronizer."""
    ignored = ignored_parameters(ddp)
    shared = [parameter for parameter in ddp.module.parameters() if id(parameter) not in ignored]
    parameters = [parameter for parameter in shared if parameter.requires_grad]
    frozen = [parameter for parameter in shared if not parameter.requires_grad]
    buffers = [
        buffer for buffer in ddp.module.buffers() if buffer.dtype in AVERAGED_DTYPES and id(buffer) not in ignored
    ]

    def make_core(backend: Any) -> Any:
        return attach_core(backend, parameters, buffers, frozen)

    try:
        core = make_core(backend_of(ddp.process_group))
    except torch.distributed.DistBackendError as error:
        if membership is None or not membership.is_newcomer:
            raise
        # One of them is lost already: the others count on this one to go on with them.
        membership.fail(error)
        core = membership.renew(error, make_core)
    backend = backend_of(ddp.process_group)
    ddp.broadcast_buffers = False
    synchronizer = kind(core, ddp, optimizers, [*parameters, *buffers])
    if not isinstance(backend, _C.ProcessGroupPrague):
        synchronizer.refuse_uneven_inputs(backend.name())
    if membership is not None:
        synchronizer.enable_elastic(membership, make_core)
    return synchronizer
