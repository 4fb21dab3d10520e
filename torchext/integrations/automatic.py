"""Finds the optimizers of a DistributedDataParallel model, and attaches all when training begins.

The one way that ``torchext.run`` and the callbacks of frameworks share. :func:`watch` keeps weak references to the
optimizers and DDP models that are made from then on. :func:`attach_found` picks those that have a model's
trainable parameters, on all ranks or on none.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchext._attach import attach
from torchext.backends import backend_of
from torchext.backends.unattached import known_as_plain
from torchext.base.eager_only import eager_only
from torchext.ddp.attach_checks import shown
from torchext.ddp.forward_hooks import Hook
from torchext.ddp.step_hooks import _watch_steps
from torchext.ddp.synchronizer import Synchronizer, ignored_parameters
from torchext.ddp.wrapped_optimizer import unwrapped

__all__ = [
    "OptimizerNotFoundError",
    "attach_at_first_forward",
    "attach_found",
    "find_optimizers",
    "has_seen_training",
    "is_ours",
    "watch",
    "wrapper_of",
]

_numbers = itertools.count()
_optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
_models: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
# The ids of optimizers whose step is under way, with what is to be done behind it.
_stepping: dict[int, list[Callable[[], Any]]] = {}
# What is called with each DDP model that is made.
_made: list[Callable[[DistributedDataParallel], None]] = []
# Numbers of such models over a group of torchext's that have been trained, by attach_at_first_forward().
_trained: list[int] = []


class OptimizerNotFoundError(ValueError):
    """It is not known which optimizers have the trainable parameters of a model that is to be attached."""


@functools.cache
def watch() -> None:
    """From now on knows the optimizers and DDP models that are made. Harmless when called again."""
    optimizer_init, model_init = torch.optim.Optimizer.__init__, DistributedDataParallel.__init__

    @functools.wraps(optimizer_init)
    def init_optimizer(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        optimizer_init(self, *args, **kwargs)
        _optimizers[next(_numbers)] = self

    @functools.wraps(model_init)
    def init_model(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        model_init(self, *args, **kwargs)
        _models[next(_numbers)] = self
        for action in _made:
            action(self)

    torch.optim.Optimizer.__init__ = init_optimizer  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = init_model  # type: ignore[method-assign]
    _watch_steps()  # which attach() could not register while hooks behind a step run
    register_optimizer_step_pre_hook(_begin_step)
    register_optimizer_step_post_hook(_end_step)


@eager_only("torchext: an optimizer's step is looked at")
def _begin_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _stepping[id(optimizer)] = []


@eager_only("torchext: an optimizer's step is looked at")
def _end_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for action in _stepping.pop(id(optimizer), ()):
        action()


def is_ours(ddp: Any) -> TypeGuard[DistributedDataParallel]:
    """Whether this is a DDP model whose process group runs on a backend of torchext."""
    if not isinstance(ddp, DistributedDataParallel) or ddp.process_group is None or not dist.is_initialized():
        return False
    try:
        backend_of(ddp.process_group)
    except (ValueError, RuntimeError):  # another's, or one that has ended
        return False
    return True


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """The newest DDP model, of those made under :func:`watch`, that trains a parameter of this module."""
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    for _, ddp in sorted(_models.items(), reverse=True):
        if any(id(parameter) in trained for parameter in ddp.module.parameters()):
            return ddp
    return None


def find_optimizers(
    ddp: DistributedDataParallel, optimizers: Iterable[Any] | None = None
) -> list[torch.optim.Optimizer]:
    """The one optimizer that has all of a model's trainable parameters, or those among which they are divided.

    Args:
        ddp: The model.
        optimizers: Those to choose from, or their wrappers; None: those made since :func:`watch` that still live.

    Raises:
        OptimizerNotFoundError: A parameter has no optimizer, or more than one.
    """
    known = None if optimizers is None else list({id(o): o for o in map(unwrapped, optimizers)}.values())
    ignored = ignored_parameters(ddp)
    trained = {id(p): n for n, p in ddp.module.named_parameters() if p.requires_grad and id(p) not in ignored}
    for attempt in range(2):
        candidates = known if known is not None else [optimizer for _, optimizer in sorted(_optimizers.items())]
        shares = [(optimizer, share) for optimizer in candidates if (share := _owned(optimizer, trained))]
        whole = [optimizer for optimizer, share in shares if len(share) == len(trained)]
        if len(whole) == 1:
            return whole
        counts = collections.Counter(key for _, share in shares for key in share)
        if shares and len(counts) == len(trained) and max(counts.values()) == 1:
            return [optimizer for optimizer, _ in shares]
        if known is None and attempt == 0:
            del candidates, shares, whole  # an optimizer that is gone may wait in a cycle
            gc.collect()
    raise OptimizerNotFoundError(_explain(shares, counts, trained))


def _owned(optimizer: torch.optim.Optimizer, trained: dict[int, str]) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"] if id(p) in trained}


def _explain(
    shares: list[tuple[torch.optim.Optimizer, set[int]]], counts: collections.Counter[int], trained: dict[int, str]
) -> str:
    """Why a model's optimizers are not known, and what to do."""
    having = [optimizer for optimizer, _ in shares]
    if not having:
        return (
            "no optimizer has the model's parameters; make it, of the parameters of the model that is trained, before "
            "the first training forward"
        )
    several = [trained[key] for key, count in counts.items() if count > 1]
    if several:
        return (
            f"{_names(having)} have the same parameters ({shown(several)}); keep one optimizer of them, or call "
            "torchext.attach(model, optimizer) with the one that steps, before the first training forward"
        )
    missing = [name for key, name in trained.items() if key not in counts]
    return (
        f"{_names(having)} {'does' if len(having) == 1 else 'do'} not have {len(missing)} of the model's trainable "
        f"parameters ({shown(missing)}); freeze them before the model is wrapped, or give them to an optimizer, too"
    )


def _names(optimizers: list[torch.optim.Optimizer]) -> str:
    names = [type(optimizer).__name__ for optimizer in optimizers]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def attach_found(
    ddp: DistributedDataParallel, optimizers: Iterable[Any] | None = None, *, say: Callable[[str], Any] | None = None
) -> Synchronizer | None:
    """Attaches a model with the optimizers that :func:`find_optimizers` finds. Collective.

    Args:
        ddp: A model whose process group runs on a backend of torchext.
        optimizers: As of :func:`find_optimizers`.
        say: Called on rank 0 with a line that says what was attached.

    Returns:
        What ``attach`` returns. None where the model cannot be attached: rank 0 warns with the reason, and training
        goes on as plain DDP on all ranks.

    Raises:
        torch.distributed.DistBackendError: The group has failed.
    """
    name, first = dist.get_backend(ddp.process_group), dist.get_rank(ddp.process_group) == 0
    reason, found = "", list[torch.optim.Optimizer]()
    try:
        found = find_optimizers(ddp, optimizers)
    except OptimizerNotFoundError as error:
        reason = str(error)
    everywhere = torch.tensor(int(bool(found)), device="cpu")
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=ddp.process_group)
    if found and everywhere.item():
        try:
            synchronizer = attach(ddp, found)
        except (TypeError, ValueError) as error:
            reason = str(error)
        else:
            if say is not None and first:
                say(
                    f"attached {type(ddp.module).__name__} with {_names(found)} to {name}, "
                    f"{dist.get_world_size(ddp.process_group)} workers"
                )
            return synchronizer
    if first:
        warnings.warn(
            f"torchext: {type(ddp.module).__name__} is not attached to {name} and trains as plain DDP: "
            + (reason or "another rank has not found its optimizer, and says why where it can"),
            RuntimeWarning,
            stacklevel=2,
        )
    known_as_plain(ddp)
    return None


def has_seen_training() -> bool:
    """Whether a model over a group of torchext's has been trained since :func:`attach_at_first_forward`."""
    return bool(_trained)


def attach_at_first_forward(
    made: Callable[[], Any], done: Callable[[Synchronizer], Any], say: Callable[[str], Any]
) -> None:
    """From now on each DDP model that is made is attached at its first training forward.

    That is one with gradients, of a module in training mode (frameworks leave the wrapper in whatever mode), over a
    group of torchext's, unless something else has attached it. Inside an optimizer's step (a closure) the step is ended
    first, as plain DDP.

    Args:
        made: Called when a DDP model has been made.
        done: Called with what attached it.
        say: As of :func:`attach_found`.
    """
    watch()

    def prepare(ddp: DistributedDataParallel) -> None:
        reference = weakref.ref(ddp)

        @eager_only("torchext.run attaches the model at its first training forward")
        def before_forward() -> None:
            model = reference()
            if model is None or not model.module.training or not torch.is_grad_enabled():
                return
            handle.remove()
            if is_ours(model):
                _trained.append(id(model))
                before = set(model._forward_pre_hooks)
                _outside_steps(model, functools.partial(_attach_once, reference, done, say))
                # This call of the model has collected its hooks already.
                for key in [key for key in model._forward_pre_hooks if key not in before]:
                    model._forward_pre_hooks[key](model, ())

        handle = ddp.register_forward_pre_hook(Hook(before_forward))
        made()

    _made.append(prepare)


def _attach_once(
    reference: weakref.ref[DistributedDataParallel], done: Callable[[Synchronizer], Any], say: Callable[[str], Any]
) -> None:
    ddp = reference()
    if ddp is None or getattr(ddp, "_torchext_synchronizer", None) is not None:
        return
    synchronizer = attach_found(ddp, say=say)
    if synchronizer is not None:
        done(synchronizer)


def _outside_steps(ddp: DistributedDataParallel, action: Callable[[], Any]) -> None:
    """Now, or behind the step of this model's optimizer that is under way: its hooks would miss that one's end."""
    trained = {id(p): "" for p in ddp.module.parameters() if p.requires_grad}
    stepping = [o for o in _optimizers.values() if id(o) in _stepping and _owned(o, trained)]
    if stepping:
        _stepping[id(stepping[0])].append(action)
    else:
        action()
