"""When the gradients of a model are ready, and when its parameters are used first: measured on a few local steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from torchext.auto import json_file
from torchext.auto.all_ranks import checked_group, errors_on_all, gathered
from torchext.base.plain import plain
from torchext.ddp.forward_hooks import Hook, OutputHook, tensors_in

__all__ = ["ParameterProfile", "Profile", "Stopwatch", "checked_model", "profile"]

_CALLER = "torchext.auto.profile"
_MOST_STEPS = 1000
Step = Callable[[Any], object]


@dataclass(frozen=True)
class ParameterProfile:
    """One parameter that gets a gradient.

    Args:
        name: As ``named_parameters`` has it.
        shape: Of the parameter.
        dtype: As torch writes it, ``"torch.float32"``.
        nbytes: Of its gradient.
        ready_seconds: When the gradient is ready, from the start of the backward pass.
        first_use: The span of the forward pass that uses the parameter first, a position in
            ``Profile.forward_seconds``.
        kind: ``"linear"``, ``"embedding"`` (the weight of such a layer), or ``"dense"``.
        rows: Of a linear layer or an embedding: rows of its input in a step, the most of all ranks; else 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    ready_seconds: float
    first_use: int
    kind: str = "dense"
    rows: int = 0


@dataclass(frozen=True)
class Profile:
    """What :func:`profile` measures of a model.

    Args:
        parameters: Those that get gradients, in the order in which these are ready.
        forward_seconds: Spans of the forward pass. The first is what comes before any layer with parameters; then
            each begins where such a layer is entered for the first time. The loss belongs to the last.
        backward_seconds: Of the whole backward pass.
        step_seconds: Of each rank its measured steps: forward and backward pass together, without an optimizer.
        parameter_bytes: Of all parameters, the frozen ones too.
        without_gradient: Names of trainable parameters that got no gradient.
        device: Kind of the model's device.
    """

    parameters: tuple[ParameterProfile, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: float
    step_seconds: tuple[tuple[float, ...], ...]
    parameter_bytes: int
    without_gradient: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients together."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def compute_seconds(self) -> float:
        """Of forward and backward pass on this profile's rank, in the median step."""
        return sum(self.forward_seconds) + self.backward_seconds

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON."""
        json_file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: An unknown key or version, or a value out of range; the message has the key.
        """
        return json_file.load(cls, path)


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
    return _merged(gathered(group, own))


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


def _merged(profiles: list[Profile]) -> Profile:
    """Rank 0's, with what it needs of the others."""
    first = profiles[0]
    shapes = {parameter.name: parameter.shape for parameter in first.parameters}
    for rank, other in enumerate(profiles):
        others = {parameter.name: parameter.shape for parameter in other.parameters}
        for name in [*shapes, *others]:
            if shapes.get(name) != others.get(name):
                raise ValueError(
                    f"{_CALLER}: step reaches other parameters on different ranks: {name!r} has a gradient of shape "
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


class Stopwatch:
    """Marks points in time on a device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"

    def mark(self) -> Any:
        """Now, on the device."""
        if self._on_cpu:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if not self._on_cpu:
            torch.accelerator.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks, after :meth:`wait`."""
        seconds: float = end - begin if self._on_cpu else begin.elapsed_time(end) / 1e3
        return max(0.0, seconds)


class _Marks:
    """One step: when it began, which layer was entered when, and when which gradient was there."""

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.entered: dict[int, Any] = {}  # id of a module -> when
        self.forward_end: Any = None
        self.backward_begin: Any = None
        self.ready: dict[int, Any] = {}  # id of a parameter -> when
        self.end: Any = None


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
        self._trained = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        self._device = self._named[0][1].device if self._named else torch.device("cpu")
        self._watch = Stopwatch(self._device)
        self._marks = _Marks(None)
        self._rows: dict[int, int] = {}  # id of a weight -> rows

    def warm_up(self) -> None:
        """One step, of which only what it does counts."""
        with self._without_trace(), _NoCollectives():  # type: ignore[no-untyped-call]
            self._run()

    def measured(self) -> Profile:
        """The steps that count."""
        with self._without_trace():
            return self._profile([self._run() for _ in range(self._steps)])

    def _run(self) -> _Marks:
        for _, parameter in self._trained:
            parameter.grad = None
        self._watch.wait()
        marks = self._marks = _Marks(self._watch.mark())
        with torch.enable_grad():
            self._step(self._model)
        marks.end = self._watch.mark()
        self._watch.wait()
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
        handles = self._hooks()
        devices = [] if self._device.type == "cpu" else [self._device]
        try:
            with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
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

    def _hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for _, parameter in self._trained:
            handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_ready))  # type: ignore[no-untyped-call]
        for module in self._model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if next(module.parameters(recurse=False), None) is not None:
                hook = Hook(functools.partial(self._enter, id(module)))
                handles.append(module.register_forward_pre_hook(hook, prepend=True))
            if isinstance(module, (nn.Linear, nn.Embedding)):
                handles.append(module.register_forward_pre_hook(self._count_rows))
        if not isinstance(self._model, torch.jit.ScriptModule):
            handles.append(self._model.register_forward_hook(OutputHook(self._forward_done)))
        return handles

    def _enter(self, module: int) -> None:
        self._marks.entered.setdefault(module, self._watch.mark())

    def _count_rows(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor):
            width = module.in_features if isinstance(module, nn.Linear) else 1
            key = id(module.weight)
            self._rows[key] = max(self._rows.get(key, 0), inputs[0].numel() // max(1, int(width)))

    def _forward_done(self, output: Any) -> None:
        marks = self._marks
        marks.forward_end = self._watch.mark()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_backward(marks))  # type: ignore[no-untyped-call]

    def _begin_backward(self, marks: _Marks) -> None:
        if marks.backward_begin is None:
            marks.backward_begin = self._watch.mark()

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        self._marks.ready[id(parameter)] = self._watch.mark()  # of several passes the last

    def _profile(self, all_marks: list[_Marks]) -> Profile:
        """The median of each mark over the steps."""
        for marks in all_marks:
            first_ready = min(marks.ready.values(), key=lambda mark: self._watch.seconds(marks.begin, mark))
            if marks.backward_begin is None:  # outputs that torch does not see
                marks.backward_begin = marks.forward_end if marks.forward_end is not None else first_ready

        entered = self._medians([(marks.begin, marks.entered) for marks in all_marks])
        ready = self._medians([(marks.backward_begin, marks.ready) for marks in all_marks])
        passes = [(marks.begin, {0: marks.backward_begin}) for marks in all_marks]
        passes_back = [(marks.backward_begin, {0: marks.end}) for marks in all_marks]
        forward, backward = self._medians(passes)[0], self._medians(passes_back)[0]
        ordered = sorted(entered, key=lambda module: entered[module])
        limits = [0.0, *(min(entered[module], forward) for module in ordered), forward]
        first_use = self._first_uses({module: place + 1 for place, module in enumerate(ordered)})
        parameters = [
            self._parameter(name, parameter, min(ready[id(parameter)], backward), first_use)
            for name, parameter in self._trained
            if id(parameter) in ready
        ]
        got = {parameter.name for parameter in parameters}
        return Profile(
            parameters=tuple(sorted(parameters, key=lambda parameter: parameter.ready_seconds)),
            forward_seconds=tuple(end - begin for begin, end in itertools.pairwise(limits)),
            backward_seconds=backward,
            step_seconds=(tuple(self._watch.seconds(marks.begin, marks.end) for marks in all_marks),),
            parameter_bytes=sum(parameter.nbytes for _, parameter in self._named),
            without_gradient=tuple(name for name, _ in self._trained if name not in got),
            device=self._device.type,
        )

    def _medians(self, steps: list[tuple[Any, dict[int, Any]]]) -> dict[int, float]:
        """Of each key the median of the seconds from a step's first mark to the key's, over the steps that have it."""
        found: dict[int, list[float]] = {}
        for begin, marks in steps:
            for key, mark in marks.items():
                found.setdefault(key, []).append(self._watch.seconds(begin, mark))
        return {key: statistics.median(seconds) for key, seconds in found.items()}

    def _first_uses(self, span_of: dict[int, int]) -> dict[int, int]:
        """The id of a parameter -> the first span whose layer owns it; the very first where no layer was entered."""
        uses: dict[int, int] = {}
        for module in self._model.modules():
            span = span_of.get(id(module))
            if span is not None:
                for parameter in module.parameters(recurse=False):
                    uses[id(parameter)] = min(span, uses.get(id(parameter), span))
        return uses

    def _parameter(
        self, name: str, parameter: torch.Tensor, ready: float, first_use: dict[int, int]
    ) -> ParameterProfile:
        owners = [
            module
            for module in self._model.modules()
            if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight is parameter
        ]
        kind = "dense" if not owners else "linear" if isinstance(owners[0], nn.Linear) else "embedding"
        return ParameterProfile(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype),
            nbytes=parameter.nbytes,
            ready_seconds=ready,
            first_use=first_use.get(id(parameter), 0),
            kind=kind,
            rows=self._rows.get(id(parameter), 0) if owners else 0,
        )


@torch.no_grad()
def _put_back(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in values:
        tensor.copy_(value)
