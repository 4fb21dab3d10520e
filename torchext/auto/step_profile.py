"""A step profile measures when gradients are ready and when parameters are used first, on a few local steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torchext.auto.all_ranks import checked_group, errors_on_all, gathered
from torchext.auto.model_profile import ParameterProfile, Profile
from torchext.auto.step_marks import Marks, StepMarks, Stopwatch
from torchext.base.plain import plain

__all__ = ["ParameterProfile", "Profile", "Stopwatch", "checked_model", "merged", "profile"]

_CALLER = "torchext.auto.profile"
_MOST_STEPS = 1000
Step = Callable[[Any], object]


def profile(model: nn.Module, step: Step, *, steps: int = 5, group: dist.ProcessGroup | None = None) -> Profile:
    """Measures when gradients are ready and parameters are used, on one step to warm up and some more. Collective.

    Leaves no trace: parameters, gradients, buffers, random numbers of torch, train and eval modes and hooks are as
    before. Each rank runs its steps alone; the ranks exchange what they found when all are done. Without
    ``init_process_group`` this is local.

    Args:
        model: The module itself, not wrapped.
        step: Called with the model. Runs forward pass, loss and backward pass once on this rank's data; no optimizer,
            and no collective.
        steps: How many are measured, 1 to 1000.
        group: Whose ranks take part; None: the default group.

    Returns:
        Rank 0's profile, with the steps of all ranks and the most rows; the same on all ranks.

    Raises:
        TypeError: ``model`` is no module, is wrapped in DistributedDataParallel or attached; ``step`` is not callable.
        ValueError: ``steps`` is out of range; ``step`` makes a collective, writes parameters, leaves no gradients, or
            reaches other parameters on another rank; the model has a SyncBatchNorm. Raised on all ranks.
        RuntimeError: ``step`` raised on another rank.
    """
    group = checked_group(_CALLER, group) if group is not None or dist.is_initialized() else None
    if group is None or group.size() == 1:
        measurement = _Measurement(model, step, _checked_steps(steps))
        measurement.warm_up()
        return measurement.measured()
    with errors_on_all(_CALLER, group):
        measurement = _Measurement(model, step, _checked_steps(steps))
    with errors_on_all(_CALLER, group):
        measurement.warm_up()
    with errors_on_all(_CALLER, group):
        own = measurement.measured()
    return merged(_CALLER, gathered(group, own))


def checked_model(caller: str, model: object) -> nn.Module:
    """The model, if it is a module by itself.

    Raises:
        TypeError: It is none, or is wrapped or attached.
    """
    if isinstance(model, DistributedDataParallel):
        attached = "attached" if getattr(model, "_torchext_synchronizer", None) is not None else "wrapped"
        raise TypeError(f"{caller}: the model is {attached} (DistributedDataParallel); pass the module inside")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a torch.nn.Module, got {type(model).__name__}; pass the module")
    for name, child in model.named_modules():
        if isinstance(child, DistributedDataParallel):
            raise TypeError(f"{caller}: {name!r} is wrapped in DistributedDataParallel; pass the module before that")
    return model


def _checked_steps(steps: int) -> int:
    steps = plain(steps)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MOST_STEPS:
        raise ValueError(f"{_CALLER}: steps must be a whole number from 1 to {_MOST_STEPS}, got {steps!r}")
    return steps


def merged(caller: str, profiles: list[Profile]) -> Profile:
    """Rank 0's, with what it needs of the others.

    Raises:
        ValueError: Ranks have gradients of different parameters.
    """
    first = profiles[0]
    shapes = {parameter.name: parameter.shape for parameter in first.parameters}
    for rank, other in enumerate(profiles):
        others = {parameter.name: parameter.shape for parameter in other.parameters}
        for name in [*shapes, *others]:
            if shapes.get(name) != others.get(name):
                raise ValueError(
                    f"{caller}: step reaches other parameters on different ranks: {name!r} has a gradient of shape "
                    f"{shapes.get(name, 'none')} on rank 0 and {others.get(name, 'none')} on rank {rank}; let it run "
                    "the same layers everywhere"
                )
    rows = {
        parameter.name: max(p.rows for other in profiles for p in other.parameters if p.name == parameter.name)
        for parameter in first.parameters
    }
    return replace(
        first,
        parameters=tuple(replace(parameter, rows=rows[parameter.name]) for parameter in first.parameters),
        step_seconds=tuple(own for other in profiles for own in other.step_seconds),
    )


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a collective is about to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            name = func.name().partition("::")[2].rstrip("_")
            raise ValueError(
                f"{_CALLER}: step makes a collective ({name}), and each rank is measured alone; take it out of step"
            )
        return func(*args, **(kwargs or {}))


class _Measurement:
    """The steps of one rank."""

    def __init__(self, model: object, step: Step, steps: int) -> None:
        self._model = checked_model(_CALLER, model)
        if not callable(step):
            raise TypeError(
                f"{_CALLER}: step must be callable with the model, got {type(step).__name__}; pass a function that runs"
                " forward pass, loss and backward pass"
            )
        for name, child in self._model.named_modules():
            if isinstance(child, nn.SyncBatchNorm):
                raise ValueError(
                    f"{_CALLER}: {name!r} is a SyncBatchNorm, which needs all ranks in each forward pass; measure the "
                    "model with BatchNorm, before it is converted"
                )
        self._step, self._steps = step, steps
        self._named = list(self._model.named_parameters())
        self._marks = StepMarks(self._model, own_steps=True)

    def warm_up(self) -> None:
        """One step, of which only what it does counts."""
        with self._without_trace(), _NoCollectives():  # type: ignore[no-untyped-call]
            self._run()

    def measured(self) -> Profile:
        """The steps that count."""
        with self._without_trace():
            return self._marks.profile([self._run() for _ in range(self._steps)])

    def _run(self) -> Marks:
        watch = self._marks.watch
        for _, parameter in self._marks.trained:
            parameter.grad = None
        watch.wait()
        marks = self._marks.begin()
        with torch.enable_grad():
            self._step(self._model)
        marks.end = watch.mark()
        watch.wait()
        if not marks.ready:
            raise ValueError(
                f"{_CALLER}: step leaves no gradients in the model's parameters; let it call backward() on the loss of"
                " the model that it is given"
            )
        return marks

    @contextlib.contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Runs what is inside, with hooks, and puts everything back."""
        parameters = [(name, p, p._version, p.detach().clone()) for name, p in self._named]
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        gradients = [(parameter, parameter.grad) for _, parameter in self._named]
        modules = [(module, module.training, dict(module._buffers)) for module in self._model.modules()]
        handles = self._marks.hooks()
        device = self._marks.device
        devices = [] if device.type == "cpu" else [device]
        try:
            with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for module, training, own_buffers in modules:
                module.training = training
                module._buffers.update(own_buffers)
            changed = [(name, p, value) for name, p, version, value in parameters if p._version != version]
            # Kernels of batch normalization write buffers without a new version.
            _put_back([*buffers, *((p, value) for _, p, value in changed)])
            for parameter, gradient in gradients:
                parameter.grad = gradient
        if changed:
            raise ValueError(
                f"{_CALLER}: step writes the parameter {changed[0][0]!r}; leave the optimizer out of it. It is as it "
                "was before"
            )


@torch.no_grad()
def _put_back(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in values:
        tensor.copy_(value)
