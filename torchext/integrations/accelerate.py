"""For scripts with an ``accelerate.Accelerator``: one call attaches a prepared model, and has the average saved.

On the CPU Accelerate makes process groups of Gloo only, so the group is made before the Accelerator, which takes it.
Under ``python -m torchext.run`` neither is needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from torchext.integrations.automatic import attach_found, is_ours
from torchext.synchronizer import Synchronizer, in_use

__all__ = ["attach", "save_averages", "save_averages_everywhere"]


def attach(accelerator: Any, model: Any) -> Synchronizer | None:
    """Attaches a model that an Accelerator has prepared, with that of its optimizers which steps it. Collective.

    From then on ``accelerator.save_state()`` writes the average of all workers' models.

    Args:
        accelerator: Behind ``prepare()``.
        model: What ``prepare()`` returned for the model.

    Returns:
        What :func:`torchext.attach` returns. None where training goes on as without torchext: no
        DistributedDataParallel, a process group of another backend, or no optimizer that has the model's parameters,
        of which rank 0 warns.

    Raises:
        RuntimeError: It has been attached already.
    """
    if not is_ours(model):
        return None
    synchronizer = attach_found(model, accelerator._optimizers)
    if synchronizer is not None:
        save_averages(accelerator)
    return synchronizer


def save_averages(accelerator: Any) -> None:
    """From now on ``accelerator.save_state()`` writes the average of each attached model. Harmless when called again.

    All ranks call ``save_state``, as without torchext.
    """
    if "save_state" not in vars(accelerator):
        accelerator.save_state = functools.partial(_save_average, type(accelerator).save_state, accelerator)


@functools.cache
def save_averages_everywhere() -> None:
    """The same for all Accelerators, for scripts that are not to be touched."""
    kind: Any = importlib.import_module("accelerate").Accelerator
    kind.save_state = functools.partialmethod(_of_class, kind.save_state)


def _of_class(accelerator: Any, save_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _save_average(save_state, accelerator, *args, **kwargs)


def _save_average(save_state: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_state`` inside ``averaged()`` of each attached model that is saved."""
    saved = {id(parameter) for model in accelerator._models for parameter in model.parameters()}
    with contextlib.ExitStack() as averages:
        for synchronizer in in_use():
            # One that averages is the script's own doing.
            if synchronizer._trained & saved and not synchronizer._averaging:
                averages.enter_context(synchronizer.averaged())
        return save_state(accelerator, *args, **kwargs)
