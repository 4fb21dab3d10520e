"""A warning where a model trains as plain DDP on a group of torchext's, for want of ``attach``."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchext.base.eager_only import eager_only

__all__ = ["known_as_plain", "warn_of_unattached"]

# So many optimizers have their first step looked at: who trains something else first is still told.
_MOST = 4
_plain: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def known_as_plain(model: DistributedDataParallel) -> None:
    """Somebody has been told already why this model is not attached."""
    _plain.add(model)


@functools.cache
def warn_of_unattached(backend_of: Callable[[dist.ProcessGroup], Any]) -> None:
    """From now on the first steps of optimizers are looked at, until there is a DDP model on one of torchext's groups.

    Groups that only serve collectives have none, and nothing is said.
    """
    made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # from now on: those on these groups are
    looked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    left = _MOST

    def note(module: nn.Module, *_: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            made.add(module)

    @eager_only("torchext: an optimizer's first step is looked at")
    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal left
        if not left or optimizer in looked:
            return
        looked.add(optimizer)
        models = list(_ours(made, backend_of))
        left = 0 if models else left - 1
        for model, name in models:
            known = getattr(model, "_torchext_synchronizer", None) is not None or model in _plain
            if model.process_group.rank() == 0 and model.module.training and not known:
                warnings.warn(
                    f"torchext: a DistributedDataParallel({type(model.module).__name__}) trains on a group of backend "
                    f"{name!r} as plain DDP: nothing has attached it. The missing line, in front of the training loop: "
                    "sync = torchext.attach(ddp_model, optimizer)",
                    stacklevel=5,
                )

    # When it is given the module that it wraps. To search all objects for models takes longer than many a step.
    register_module_module_registration_hook(note)
    register_optimizer_step_pre_hook(look)


def _ours(
    models: Iterable[DistributedDataParallel], backend_of: Callable[[dist.ProcessGroup], Any]
) -> Iterator[tuple[DistributedDataParallel, str]]:
    """The models on torchext's groups, each with its backend's name."""
    for model in models:
        try:
            yield model, backend_of(model.process_group).name()
        except (ValueError, RuntimeError, AttributeError):  # another's, one whose group has ended, one half made
            continue
