"""Scripts with an ``accelerate.Accelerator`` attach a prepared model by one call, which also has the average saved.

On the CPU Accelerate makes process groups of Gloo only, so the group is made before the Accelerator, which takes it.
Under ``python -m torchext.run`` neither is needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchext.ddp.synchronizer import Synchronizer, active_synchronizers
from torchext.decentralized.averaging_synchronizer import AveragingSynchronizer
from torchext.integrations.automatic import attach_found, is_ours
from torchext.integrations.barriers import average_now

__all__ = ["attach", "save_averages", "save_averages_everywhere"]


def attach(accelerator: Any, model: Any) -> Synchronizer | None:
    """Attaches a model that an Accelerator has prepared, with that of its optimizers which steps it. Collective.

    From then on what it saves is the average of all workers' models, see :func:`save_averages`.

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
    """From now on what an Accelerator saves is the average of each attached model. Harmless when called again.

    All ranks call ``save_state()`` and ``save_model()``, as without torchext. ``wait_for_everyone()`` makes replicas
    their average for good: rank 0 then saves alone what is the same on all ranks.
    """
    for name, function in {**_SAVING, "wait_for_everyone": _wait_for_everyone}.items():
        if name not in vars(accelerator):
            own = getattr(type(accelerator), name)
            setattr(accelerator, name, functools.partial(function, own, accelerator))


@functools.cache
def save_averages_everywhere() -> None:
    """The same for all Accelerators, for scripts that are not to be touched.

    Under ``torchext.run`` the barrier in ``wait_for_everyone()`` makes the average.
    """
    kind: Any = importlib.import_module("accelerate").Accelerator
    for name, function in _SAVING.items():
        setattr(kind, name, functools.partialmethod(_of_class, function, getattr(kind, name)))


def _of_class(accelerator: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    own, *given = args
    return function(own, accelerator, *given, **kwargs)


def _save_state(own: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    with _on_average("save_state", accelerator._models):
        return own(accelerator, *args, **kwargs)


def _save_model(own: Callable[..., Any], accelerator: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _on_average("save_model", [model], optimizer_state=False):
        return own(accelerator, model, *args, **kwargs)


def _wait_for_everyone(own: Callable[..., Any], accelerator: Any) -> Any:
    trained = _parameters(accelerator._models)
    average_now(lambda synchronizer: bool(synchronizer._trained & trained))
    return own(accelerator)


_SAVING: dict[str, Callable[..., Any]] = {"save_state": _save_state, "save_model": _save_model}


@contextlib.contextmanager
def _on_average(name: str, models: Iterable[torch.nn.Module], optimizer_state: bool = True) -> Iterator[None]:
    """Inside, those attached models that these have parameters of are the average. Collective, but with ``dear``.

    Without the optimizer's state also where nobody has stepped since all have met: rank 0 may then save alone.
    """
    saved = _parameters(models)
    with contextlib.ExitStack() as averages:
        for synchronizer in active_synchronizers():
            if not synchronizer._trained & saved:
                continue
            if not isinstance(synchronizer, AveragingSynchronizer):
                synchronizer.wait()
            # One that averages is the script's own doing.
            elif not synchronizer._averaging and (optimizer_state or not synchronizer._same):
                try:
                    averages.enter_context(synchronizer.averaged(optimizer_state=optimizer_state))
                except dist.DistBackendError as error:
                    raise type(error)(
                        f"torchext: accelerator.{name}() writes the average of all ranks: call it on every rank. What "
                        f"rank 0 saves alone is the average behind accelerator.wait_for_everyone() ({error})"
                    ) from error
        yield


def _parameters(models: Iterable[torch.nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}
