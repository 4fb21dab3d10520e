"""Attaching a model to ``dear``: what it cannot train, and the synchronizer of what it can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of
from torchext.ddp.attach_checks import Optimizers, before_dear, check_dense, shown, stepped_by
from torchext.ddp.averaged_apart import averaged_apart
from torchext.ddp.lifetime import keep_with_model
from torchext.ddp.synchronizer import ignored_parameters
from torchext.dear.bucket_source import BucketSource
from torchext.dear.dear_refusals import check_stepped
from torchext.dear.dear_synchronizer import DearSynchronizer, DedicatedGroup

__all__ = ["check_dear", "prepare_dear", "prepare_planned", "why_not_dear"]


def check_dear(model: nn.Module, optimizers: Optimizers, form: str) -> None:
    """Refuses optimizers, and pairs of a model and an optimizer, that a form of ``dear`` cannot train."""
    for optimizer in optimizers:
        for check in before_dear:
            check(model, optimizer, form)
        check_stepped(optimizer, form)


def why_not_dear(ddp: DistributedDataParallel, optimizers: Optimizers, form: str) -> str:
    """Why ``dear`` cannot train this model with these optimizers; empty: it can."""
    try:
        _dear_parameters(ddp, optimizers, form)
    except (TypeError, ValueError) as error:
        return str(error).removeprefix("torchext.attach: ")
    return ""


def prepare_planned(
    ddp: DistributedDataParallel, optimizers: Optimizers, plan: BucketSource
) -> Callable[[], DearSynchronizer]:
    """Readies ``dear`` for a model that :func:`attach` has given another synchronizer. Collective.

    Args:
        ddp: The model, on a group of ``dear``'s class.
        optimizers: Its own.
        plan: With the buckets.

    Returns:
        Turns the model over: between two steps, and no collective.
    """
    backend = backend_of(ddp.process_group)
    assert isinstance(backend, _C.ProcessGroupDear)
    make = prepare_dear(backend, ddp, optimizers, None, plan)
    return lambda: keep_with_model(ddp, make())


def _dear_parameters(
    ddp: DistributedDataParallel, optimizers: Optimizers, form: str
) -> list[tuple[str, torch.nn.Parameter]]:
    """What ``dear`` trains of a model; raises where it cannot."""
    check_dear(ddp.module, optimizers, form)
    if ddp._comm_hooks:
        raise ValueError(
            "torchext.attach: the model has a communication hook (register_comm_hook), which dear would pass by; use "
            "another backend with it, or leave it out"
        )
    owned = {id(parameter) for parameter in stepped_by(optimizers)}
    ignored = ignored_parameters(ddp) - (averaged_apart(ddp) & owned)
    both = [name for name, p in ddp.module.named_parameters() if id(p) in ignored & owned and p.requires_grad]
    if both:
        raise ValueError(
            f"torchext.attach: DDP was told to ignore {shown(both)}, and dear steps with averaged gradients alone; "
            "give what is ignored an optimizer of its own"
        )
    named = [(name, parameter) for name, parameter in ddp.module.named_parameters() if id(parameter) not in ignored]
    own = ignored.union(id(parameter) for _, parameter in named)
    others = sum(id(parameter) not in own for parameter in stepped_by(optimizers))
    if others:
        raise ValueError(
            f"torchext.attach: the optimizer owns {others} parameters that are not the model's, whose gradients dear "
            "would not average; give them an optimizer of their own"
        )
    device = named[0][1].device if named else torch.device("cpu")
    for name, parameter in named:
        if parameter.device != device:
            raise TypeError(
                f"torchext.attach: parameter {name!r} is on {parameter.device} and {named[0][0]!r} on {device}; dear "
                "trains a model on one device"
            )
        check_dense("parameter", name, parameter)
    return named


def prepare_dear(
    backend: _C.ProcessGroupDear,
    ddp: DistributedDataParallel,
    optimizers: Optimizers,
    bucket_mb: float | None,
    plan: BucketSource | None,
) -> Callable[[], DearSynchronizer]:
    """Does what of attaching to ``dear`` is collective; what it returns does the rest.

    Args:
        backend: The model's.
        ddp: The model.
        optimizers: Its own.
        bucket_mb: Size of a bucket in MiB; None: what the group's options say.
        plan: With the buckets, in place of a size.
    """
    options: Any = backend.options  # declared as those of any backend
    named = _dear_parameters(ddp, optimizers, options.form)
    device = named[0][1].device if named else torch.device("cpu")
    names = [name for name, _ in named]
    parameters = [parameter for _, parameter in named]
    apart = averaged_apart(ddp)
    alone = [name for name, parameter in named if id(parameter) in apart]
    planned = None if plan is None else plan.dear_buckets(ddp.module, names, options.form, options.transport, alone)
    # What is averaged apart the exchange takes for frozen: it is in no bucket, and no hook waits for its gradient.
    exchanged = [parameter.detach() if id(parameter) in apart else parameter for parameter in parameters]
    unused_allowed = ddp.find_unused_parameters or ddp.static_graph
    dedicated_group = (
        DedicatedGroup(ddp.process_group) if device.type != "cpu" or options.transport == "collectives" else None
    )
    make_dedicated_group = None if dedicated_group is None else dedicated_group.make
    core = _C.attach_dear(backend, exchanged, names, unused_allowed, bucket_mb, planned, make_dedicated_group)
    places = frozenset(place for place, parameter in enumerate(parameters) if id(parameter) in apart)
    return functools.partial(DearSynchronizer, core, ddp, optimizers, parameters, dedicated_group, places)
