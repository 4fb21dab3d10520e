"""Marks when layers are entered and when gradients are ready in the steps of a model, and makes a profile of them."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchext.auto.model_profile import ParameterProfile, Profile
from torchext.ddp.forward_hooks import Hook, OutputHook, is_compiled, tensors_in

__all__ = ["Marks", "StepMarks", "Stopwatch"]


class Stopwatch:
    """Marks points in time on a device, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"

    def mark(self) -> Any:
        """Now, on the device."""
        if self._on_cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if not self._on_cpu:
            torch.accelerator.synchronize(self.device)

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks, after :meth:`wait`."""
        seconds: float = end - begin if self._on_cpu else begin.elapsed_time(end) / 1e3
        return max(0.0, seconds)


class Marks:
    """One step: when it began, which layer was entered when, and when which gradient was there."""

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.entered: dict[int, Any] = {}  # id of a module -> when
        self.forward_end: Any = None
        self.backward_begin: Any = None
        self.ready: dict[int, Any] = {}  # id of a parameter -> when
        self.end: Any = None


class StepMarks:
    """Hooks in a model that mark the points of its steps, one step after the other.

    Args:
        model: The module itself.
        own_steps: Whether these are steps of the profiler's own. Then rows of linear layers and embeddings are counted,
            too, and modules inside of compiled graphs marked, which are compiled anew for that.
    """

    def __init__(self, model: nn.Module, *, own_steps: bool) -> None:
        self._model, self._own_steps = model, own_steps
        self._named = list(model.named_parameters())
        self.trained = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        self.device = self._named[0][1].device if self._named else torch.device("cpu")
        self.watch = Stopwatch(self.device)
        self.now = Marks(None)
        self._rows: dict[int, int] = {}  # id of a weight -> rows

    def begin(self) -> Marks:
        """A step begins."""
        self.now = Marks(self.watch.mark())
        return self.now

    def hooks(self) -> list[RemovableHandle]:
        """Installs the hooks, which mark points of the step that has begun last."""
        handles: list[RemovableHandle] = []
        for _, parameter in self.trained:
            handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_ready))  # type: ignore[no-untyped-call]
        skipped = not self._own_steps and any(is_compiled(module) for module in self._model.modules())
        for module in [] if skipped else self._model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if next(module.parameters(recurse=False), None) is not None:
                hook = Hook(functools.partial(self._enter, id(module)))
                handles.append(module.register_forward_pre_hook(hook, prepend=True))
            if self._own_steps and isinstance(module, (nn.Linear, nn.Embedding)):
                handles.append(module.register_forward_pre_hook(self._count_rows))
        if not isinstance(self._model, torch.jit.ScriptModule):
            handles.append(self._model.register_forward_hook(OutputHook(self._forward_done)))
        return handles

    def _enter(self, module: int) -> None:
        self.now.entered.setdefault(module, self.watch.mark())

    def _count_rows(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor):
            width = module.in_features if isinstance(module, nn.Linear) else 1
            key = id(module.weight)
            self._rows[key] = max(self._rows.get(key, 0), inputs[0].numel() // max(1, int(width)))

    def _forward_done(self, output: Any) -> None:
        marks = self.now
        marks.forward_end = self.watch.mark()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_backward(marks))  # type: ignore[no-untyped-call]

    def _begin_backward(self, marks: Marks) -> None:
        if marks.backward_begin is None:
            marks.backward_begin = self.watch.mark()

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        self.now.ready[id(parameter)] = self.watch.mark()  # of several passes the last

    def profile(self, all_marks: list[Marks]) -> Profile:
        """The median of each mark over the steps."""
        for marks in all_marks:
            first_ready = min(marks.ready.values(), key=lambda mark: self.watch.seconds(marks.begin, mark))
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
            for name, parameter in self.trained
            if id(parameter) in ready
        ]
        got = {parameter.name for parameter in parameters}
        return Profile(
            parameters=tuple(sorted(parameters, key=lambda parameter: parameter.ready_seconds)),
            forward_seconds=tuple(end - begin for begin, end in itertools.pairwise(limits)),
            backward_seconds=backward,
            step_seconds=(tuple(self.watch.seconds(marks.begin, marks.end) for marks in all_marks),),
            parameter_bytes=sum(parameter.nbytes for _, parameter in self._named),
            without_gradient=tuple(name for name, _ in self.trained if name not in got),
            device=self.device.type,
        )

    def _medians(self, steps: list[tuple[Any, dict[int, Any]]]) -> dict[int, float]:
        """Of each key the median of the seconds from a step's first mark to the key's, over the steps that have it."""
        found: dict[int, list[float]] = {}
        for begin, marks in steps:
            for key, mark in marks.items():
                found.setdefault(key, []).append(self.watch.seconds(begin, mark))
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
