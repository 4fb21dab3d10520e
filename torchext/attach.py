"""``attach``: what turns a DDP model and its optimizer over to the algorithm of the group's backend."""

from __future__ import annotations

import atexit
import sys
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of
from torchext.synchronizer import AveragingSynchronizer, Synchronizer

__all__ = ["attach"]

_MEBIBYTE = 1 << 20


def _check(ddp: Any, optimizer: Any) -> None:
    if not dist.is_initialized():
        raise RuntimeError("torchext.attach before torch.distributed.init_process_group; initialize it first")
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"torchext.attach takes a DistributedDataParallel model, got {type(ddp).__name__}; wrap the model first"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"torchext.attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if getattr(ddp, "_torchext_synchronizer", None) is not None:
        raise RuntimeError(
            "torchext.attach: this model has been attached already, and DDP takes one communication hook "
            "in its life; keep the first Synchronizer, or wrap the module in a new DistributedDataParallel"
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in ddp.module.named_parameters() if p.requires_grad and id(p) not in owned]
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ValueError(
            f"torchext.attach: the optimizer does not own {len(names)} of the model's trainable parameters ({shown}); "
            "pass the optimizer that steps them all"
        )
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"torchext.attach: {name!r} is a SyncBatchNorm, which needs all workers in every forward pass; "
                "decentralized workers run at their own pace. Use BatchNorm: its statistics are averaged"
            )
    for name, tensor in ddp.module.named_parameters():
        if not tensor.is_floating_point():
            raise TypeError(f"torchext.attach: parameter {name!r} is {tensor.dtype}; only floating point is averaged")


def attach(
    ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, bucket_mb: float = 4.0
) -> Synchronizer:
    """Attaches a DDP model to the algorithm of its process group's backend. Collective.

    Installs a C++ communication hook in DDP's reducer (gradients stay local), hooks around ``optimizer.step`` and in
    front of the modules that wait for their parameters, and turns ``broadcast_buffers`` off: floating-point buffers are
    averaged with the parameters instead.

    Args:
        ddp_model: The model; its ``process_group`` was made with a torchext backend.
        optimizer: Steps all of the model's trainable parameters. Its state stays local.
        bucket_mb: Size of an averaging bucket in MiB; a bucket ends with the parameter that reaches it. With smaller
            ones the next forward can start earlier, but short messages cost more than few long ones.

    Raises:
        RuntimeError: Before ``init_process_group``, or attached twice.
        TypeError, ValueError: A model, optimizer, group or option that cannot work, named with the way out.
        torch.distributed.DistBackendError: Ranks attach different models or options (on every rank).
    """
    _check(ddp_model, optimizer)
    if not 0.001 <= bucket_mb <= 4096:
        raise ValueError(f"torchext.attach: bucket_mb must be in [0.001, 4096], got {bucket_mb}")
    backend = backend_of(ddp_model.process_group)
    if not isinstance(backend, _C.ProcessGroupPrague):
        raise ValueError(
            f"torchext.attach: the model's process group uses backend {backend.name()!r}, which trains as plain DDP; "
            "initialize with init_process_group('prague')"
        )
    synchronizer = _attach_prague(backend, ddp_model, optimizer, int(bucket_mb * _MEBIBYTE))
    ddp_model._torchext_synchronizer = synchronizer  # type: ignore[assignment]  # typed as a submodule
    _leave_at_exit(synchronizer._core)
    return synchronizer


def _attach_prague(
    backend: _C.ProcessGroupPrague, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, bucket_bytes: int
) -> Synchronizer:
    parameters = list(ddp.module.parameters())
    buffers = [buffer for buffer in ddp.module.buffers() if buffer.is_floating_point()]
    core = _C.attach_prague(backend, ddp.reducer, parameters, buffers, bucket_bytes)
    ddp.broadcast_buffers = False
    return AveragingSynchronizer(core, ddp, optimizer, [*parameters, *buffers])


def _leave_at_exit(core: _C.Synchronizer) -> None:
    """A script that ends without detach() or destroy_process_group() still keeps its promises, for two seconds."""
    reference = weakref.ref(core)

    def leave() -> None:
        alive = reference()
        # After an uncaught exception there is nothing to keep: the peers are told the reason instead.
        if alive is not None and getattr(sys, "last_value", None) is None:
            alive.leave(timedelta(seconds=2))

    atexit.register(leave)
