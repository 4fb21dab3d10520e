"""``attach``: what turns a DDP model and its optimizer over to the algorithm of the group's backend."""

from __future__ import annotations

import collections
import functools
import gc
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of, is_wrapped
from torchext.base.plain import plain
from torchext.ddp.attach_checks import Optimizers, attachers, shown, stepped_by
from torchext.ddp.lifetime import keep_with_model
from torchext.ddp.synchronizer import (
    Synchronizer,
    abandon_ended,
    active_synchronizers,
    exchanged_parameters,
    ignored_parameters,
)
from torchext.ddp.wrapped_optimizer import unwrapped
from torchext.dear.bucket_source import BucketSource
from torchext.dear.dear_attachment import prepare_dear
from torchext.decentralized.averaging_attachment import attach_averaging, check_averaging
from torchext.decentralized.hop_synchronizer import HopSynchronizer
from torchext.elastic.join import forget_newcomer, newcomer_of
from torchext.elastic.membership import Membership
from torchext.elastic.newcomers import Newcomer

__all__ = ["attach", "listed"]

_MEBIBYTE = 1 << 20


def listed(caller: str, optimizer: Any) -> Optimizers:
    """The optimizers of a script: one, or those of a list, each without a framework's wrapper.

    Raises:
        ValueError: There are none.
        TypeError: One is something else.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not given:
        raise ValueError(f"{caller}: the list of optimizers is empty; pass those that step the model's parameters")
    found = tuple(map(unwrapped, given))
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"{caller} takes a torch.optim.Optimizer, or a list of them, got {type(one).__name__}")
    return found


def _check_model(ddp: object) -> None:
    if not dist.is_initialized():
        raise RuntimeError("torchext.attach before torch.distributed.init_process_group; initialize it first")
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"torchext.attach takes a DistributedDataParallel model, got {type(ddp).__name__}; wrap the model first"
        )
    stage = getattr(ddp, "_torchext_pipeline_stage", None)
    if stage is not None:
        raise TypeError(
            f"torchext.attach: this model is stage {stage} of a pipeline (torchext.auto.pipeline), whose schedule runs "
            "its passes and reduces its gradients; leave attach out, or train without stages"
        )


def _check(ddp: DistributedDataParallel, optimizers: Optimizers) -> None:
    # Not imported to ask, which takes long: who has one has imported it.
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    for optimizer in optimizers:
        if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
            raise TypeError(
                "torchext.attach: ZeroRedundancyOptimizer sends parameters to all ranks in each step, past the backend;"
                " pass an optimizer of its optimizer_class itself; dear in its sharded form divides that state up, too"
            )
        abandon_ended(optimizer)
    if getattr(ddp, "_torchext_synchronizer", None) is not None:
        raise RuntimeError(
            "torchext.attach: this model has been attached already, and DDP takes one communication hook "
            "in its life; keep the first Synchronizer, or wrap the module in a new DistributedDataParallel"
        )
    ignored = ignored_parameters(ddp)
    owners = collections.Counter(part for own in optimizers for part in {id(p) for p in stepped_by((own,))})
    named = [(name, p) for name, p in ddp.module.named_parameters() if id(p) not in ignored]
    names = [name for name, p in named if p.requires_grad and not owners[id(p)]]
    if names:
        raise ValueError(
            f"torchext.attach: the optimizer does not own {len(names)} of the model's trainable parameters "
            f"({shown(names)}); pass the optimizer that steps them all, or a list of those that do"
        )
    names = [name for name, p in named if owners[id(p)] > 1]
    if names:
        raise ValueError(
            f"torchext.attach: {len(names)} of the model's parameters ({shown(names)}) would be stepped more than "
            "once; pass each optimizer once, and optimizers that share no parameter"
        )
    for name, tensor in named:
        if tensor.requires_grad and not tensor.is_floating_point():
            raise TypeError(
                f"torchext.attach: parameter {name!r} is {tensor.dtype}; trained are only those of floating point. "
                "Freeze it (requires_grad_(False)) before the model is wrapped, or have DDP ignore it"
            )


def attach(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    bucket_mb: float | Literal["auto"] = "auto",
    on_peer_failure: Literal["raise", "continue"] = "raise",
    plan: BucketSource | None = None,
) -> Synchronizer:
    """Attaches a DDP model to the algorithm of its process group's backend. Collective.

    Installs hooks around ``optimizer.step`` and in front of the modules that wait for their parameters. With all but
    ``dear``, a C++ communication hook in DDP's reducer keeps gradients local, optimizer state stays local, and
    ``broadcast_buffers`` is turned off: floating-point buffers are averaged with the parameters. Parameters that are
    frozen (``requires_grad=False``) now do not travel in training; where all workers meet they are averaged, too, if
    they differ (a teacher that follows each worker's student). Averaged are float32, float64, float16 and bfloat16:
    frozen parameters and buffers of other dtypes (int8, bool, complex64, float8) stay each worker's own. With ``dear``,
    the optimizer gets a slice of every parameter, and training goes on exactly as with plain DDP. What DDP was told to
    ignore is each worker's own, as without torchext; with ``dear`` an optimizer of its own steps it.

    Args:
        ddp_model: The model; its ``process_group`` was made with a torchext backend.
        optimizer: Steps all of the model's trainable parameters; or a list of several, each of which steps some. Their
            steps between two forward passes make one step of the model; one may be left out (as by ``GradScaler``). Of
            Lightning's or Accelerate's wrapper around one that one is taken, which the wrapper calls.
        bucket_mb: Size of a bucket in MiB: more overlap with smaller ones, but short messages cost more than few long
            ones. ``"auto"``: with ``prague`` and ``dssync`` 4, with ``dear`` what the group's options say. Not for
            ``hop``, which sends whole models.
        on_peer_failure: What a worker's death means to the others. ``"raise"``: an error that names it. ``"continue"``
            (``prague``, ``dssync``, ``hop``): they train on without it, as a group with new ranks; ``stats()`` and the
            log tell of it. Of several models each needs a group of its own then (``new_group``). Needs a store that
            outlives any worker, as torchrun's. Collectives of your own that are under way raise all the same, and the
            sampler goes on leaving out what the dead would have trained on.
        plan: A :class:`torchext.auto.SyncPlan` that has chosen ``dear``: its buckets are taken, in place of
            ``bucket_mb``. After 11 steps they are compared with plain all-reduce, in 66 more, and stay if they are
            faster. Where gradients come in another order than planned, sizes are tried as without a plan.

    On the backend ``torchext`` the model trains as plain DDP for 8 steps, which are measured. Then it goes on by the
    exact way that is predicted to be fastest: :class:`torchext.auto.AutoSynchronizer`.

    A model that is no longer needed wants ``detach()`` on every rank: if it is only forgotten, its threads and buffers
    stay until its group ends, because the other workers still count on it.

    Returns:
        What keeps the model in step. With ``dear`` a :class:`~torchext.DearSynchronizer`, which has the optimizer's
        state for sharded checkpoints besides, with ``hop`` a :class:`~torchext.HopSynchronizer`, which has
        ``iteration``: ``isinstance`` tells a type checker.

    Raises:
        RuntimeError: Before ``init_process_group``, or attached twice.
        TypeError, ValueError: A model, optimizer, group or option that cannot work, named with the way out.
        torch.distributed.DistBackendError: Ranks attach different models or options (on every rank).
    """
    _check_model(ddp_model)
    optimizers = listed("torchext.attach", optimizer)
    _check(ddp_model, optimizers)
    bucket_mb = plain(bucket_mb)
    if bucket_mb != "auto" and not (isinstance(bucket_mb, (int, float)) and 0.001 <= bucket_mb <= 4096):
        raise ValueError(f"torchext.attach: bucket_mb must be 'auto' or in [0.001, 4096], got {bucket_mb!r}")
    if on_peer_failure not in ("raise", "continue"):
        raise ValueError(f"torchext.attach: on_peer_failure must be 'raise' or 'continue', got {on_peer_failure!r}")
    if plan is not None:
        _check_plan(plan, bucket_mb, ddp_model.process_group)
    _check_shared(ddp_model)
    _check_others(ddp_model, on_peer_failure)
    membership = None
    newcomer = newcomer_of(ddp_model.process_group)
    if newcomer is None:
        _check_not_wrapped(ddp_model)
        own_attach = attachers.get(backend_of(ddp_model.process_group).name())
        if own_attach is not None and plan is None:
            _check_left_open(ddp_model.process_group, bucket_mb, on_peer_failure)
            return own_attach(ddp_model, optimizers)
    if bucket_mb != "auto" and _is_hop(ddp_model, newcomer):
        raise ValueError(
            f"torchext.attach: bucket_mb must be 'auto' with hop, which sends whole models, got {bucket_mb!r}; leave "
            "it out"
        )
    if newcomer is not None and on_peer_failure != "continue":
        raise ValueError(
            "torchext.attach: a worker that joins is attached as those it joins are, with on_peer_failure='continue'"
        )
    if newcomer is not None or not isinstance(backend_of(ddp_model.process_group), _C.ProcessGroupDear):
        check_averaging(ddp_model, optimizers)  # before the others count on a newcomer
    if on_peer_failure == "continue":
        if newcomer is None:
            _check_can_continue(ddp_model.process_group)
        membership = Membership(ddp_model, optimizers, newcomer)
        if newcomer is not None:
            forget_newcomer()
    backend = backend_of(ddp_model.process_group)
    synchronizer: Synchronizer
    if isinstance(backend, (_C.ProcessGroupPrague, _C.ProcessGroupDSSync)):
        bucket_bytes = int((4.0 if bucket_mb == "auto" else bucket_mb) * _MEBIBYTE)
        attach_core: Any = _C.attach_prague if isinstance(backend, _C.ProcessGroupPrague) else _C.attach_dssync
        attach_core = functools.partial(attach_core, bucket_bytes=bucket_bytes)
        synchronizer = attach_averaging(attach_core, ddp_model, optimizers, membership)
    elif isinstance(backend, _C.ProcessGroupHop):
        synchronizer = attach_averaging(_C.attach_hop, ddp_model, optimizers, membership, HopSynchronizer)
    else:
        assert isinstance(backend, _C.ProcessGroupDear)  # backend_of has refused all others
        synchronizer = prepare_dear(backend, ddp_model, optimizers, None if bucket_mb == "auto" else bucket_mb, plan)()
    return keep_with_model(ddp_model, synchronizer)


def _check_plan(plan: object, bucket_mb: object, group: dist.ProcessGroup) -> None:
    if not isinstance(plan, BucketSource):
        raise TypeError(f"torchext.attach: plan must be a torchext.auto.SyncPlan, got {type(plan).__name__}")
    if bucket_mb != "auto":
        raise ValueError(
            f"torchext.attach: the plan has buckets, and bucket_mb is {bucket_mb!r}; leave one of the two out"
        )
    backend: Any = backend_of(group)
    if not isinstance(backend, _C.ProcessGroupDear):
        raise ValueError(
            f"torchext.attach: the plan has buckets for dear, and the group's backend is {backend.name()!r}; make the "
            "group with backend='dear', or call plan.apply(model, optimizer), which makes it"
        )
    if backend.options.bucket_mb != "auto":
        raise ValueError(
            f"torchext.attach: the plan has buckets, and the group's DeAROptions have bucket_mb="
            f"{backend.options.bucket_mb!r}; leave one of the two out"
        )


def _check_left_open(group: dist.ProcessGroup, bucket_mb: object, on_peer_failure: str) -> None:
    """Refuses what a backend that chooses by itself cannot do."""
    if on_peer_failure == "continue":
        _check_can_continue(group)
    if bucket_mb != "auto":
        raise ValueError(
            f"torchext.attach: bucket_mb is {bucket_mb!r}, and the backend {backend_of(group).name()!r} chooses "
            "buckets by itself; leave it out, or make the group with backend='dear'"
        )


def _check_shared(ddp: DistributedDataParallel) -> None:
    """Refuses parameters of another attached model: both would exchange them, one behind the other's back."""

    def shared() -> list[str]:
        theirs = exchanged_parameters()
        ignored = ignored_parameters(ddp)
        named = ddp.module.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) in theirs and id(p) not in ignored]

    if shared():
        gc.collect()  # models that are gone may wait in cycles
    if names := shared():
        raise ValueError(
            f"torchext.attach: {len(names)} of the model's parameters ({shown(names)}) are those of a model that is "
            "attached already; to wrap a module anew call detach() of what attach returned for it first, and put "
            "models that share parameters into one module under one DistributedDataParallel"
        )


def _check_others(ddp: DistributedDataParallel, on_peer_failure: str) -> None:
    """Refuses models of which one, when a worker dies, makes a group anew that another needs."""
    group, continues = ddp.process_group, on_peer_failure == "continue"
    renews_world = continues and group is dist.group.WORLD

    def world_is_renewed() -> bool:  # and with it every group ends
        return any(renews_world or other._renews_world() for other in active_synchronizers())

    def group_is_renewed() -> bool:
        return any(
            (continues or other._continues()) and other._ddp.process_group is group for other in active_synchronizers()
        )

    if world_is_renewed() or group_is_renewed():
        gc.collect()  # models that are gone may wait in cycles
    if world_is_renewed():
        raise ValueError(
            "torchext.attach: on_peer_failure='continue' makes the default process group anew when a worker dies, which"
            " ends all other groups, those of other attached models among them. Several models can train on if each has"
            " a group of its own: DistributedDataParallel(model, process_group=torch.distributed.new_group(...))"
        )
    if group_is_renewed():
        raise ValueError(
            "torchext.attach: another attached model has the same process group, which on_peer_failure='continue' makes"
            " anew when a worker dies; give each model a group of its own: "
            "DistributedDataParallel(model, process_group=torch.distributed.new_group(...))"
        )


def _is_hop(ddp: DistributedDataParallel, newcomer: Newcomer | None) -> bool:
    if newcomer is not None:
        return newcomer.backend == "hop"
    return isinstance(backend_of(ddp.process_group), _C.ProcessGroupHop)


def _check_not_wrapped(ddp: DistributedDataParallel) -> None:
    """Refuses prague, whose workers wait for few others, where torch has all meet in front of a collective."""
    if isinstance(backend_of(ddp.process_group), _C.ProcessGroupPrague) and is_wrapped(ddp.process_group):
        raise ValueError(
            "torchext.attach: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch waits for all ranks in front of each of the "
            "script's collectives, before prague can complete the averages it owes other workers, and they could wait "
            "for each other; set it to INFO. PragueOptions(call_check='every') finds calls that differ, too"
        )


def _check_can_continue(group: dist.ProcessGroup) -> None:
    backend = backend_of(group)
    if group is not dist.group.WORLD and not getattr(backend, "supports_shrinking", True):
        raise ValueError(
            "torchext.attach: on_peer_failure='continue' cannot make a group of dist.split_group() anew; take "
            "dist.new_group(), or the default group"
        )
    if isinstance(backend, _C.ProcessGroupDear):
        raise ValueError(
            "torchext.attach: on_peer_failure='continue' is for decentralized training; dear's workers hold a slice of"
            " the optimizer's state each, which dies with them. Let torchrun --max-restarts go on from a checkpoint"
        )
