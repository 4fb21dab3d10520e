"""A layer profile says what each layer of a chain takes: time, memory until the backward pass, bytes handed on."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchext.auto import json_file
from torchext.auto.link_model import check_number
from torchext.auto.pipeline.layer_chain import LayerChain, without_trace
from torchext.auto.step_profile import Stopwatch, checked_model
from torchext.base.plain import plain

__all__ = ["Layer", "LayerProfile", "check_shared", "is_compiled", "layers_of", "profile"]

_CALLER = "torchext.auto.pipeline.profile"
_MOST_REPEATS = 1000
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


@dataclass(frozen=True)
class Layer:
    """One layer, for one micro-batch.

    Args:
        name: As the model names it.
        forward: Seconds of the forward pass.
        backward_input: Seconds for the gradient of the layer's input.
        backward_weight: Seconds for the gradients of its weights, when that of the input is there.
        kept_bytes: What it keeps from the forward pass for the backward pass.
        output_bytes: Of what it hands to the next layer.
        parameter_bytes: Of its parameters.

    Raises:
        ValueError: A number that is negative or not finite.
    """

    name: str
    forward: float
    backward_input: float
    backward_weight: float
    kept_bytes: int
    output_bytes: int
    parameter_bytes: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            check_number(f"{field.name} of the layer {self.name!r}", getattr(self, field.name))


@dataclass(frozen=True)
class LayerProfile:
    """The layers of a model, in the order in which they run.

    Args:
        layers: One or more, with names of their own.
        device: Kind of the device on which they were measured.
        overhead: Seconds that torch's runtime takes for an action, beside the layers. An empty stage took 0.08 ms
            on a CPU, so it is left at 0.
        compiled: Whether a layer is made by ``torch.compile``; torch does not split the backward pass of such ones.

    Raises:
        ValueError: No layers, or a name that is there twice.
    """

    layers: tuple[Layer, ...]
    device: str = "cpu"
    overhead: float = 0.0
    compiled: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers must have one or more, got none")
        names = [layer.name for layer in self.layers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"layers must have names of their own, got {name!r} twice")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers."""
        return tuple(layer.name for layer in self.layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON."""
        json_file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerProfile:
        """Reads what :meth:`save` wrote, or a file written by hand.

        Raises:
            ValueError: An unknown key or version, or a value out of range; the message has the key.
        """
        return json_file.loads(cls, _completed(Path(path).read_text()), os.fspath(path))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LayerProfile:
        """A profile from ``{"layers": [{"name": ..., "forward": ..., ...}, ...]}``; all but layers may be left out.

        Raises:
            ValueError: A key that is missing or unknown, or a value out of range; the message has the key.
        """
        head = {"format": "torchext.auto.LayerProfile", "version": 1}
        return json_file.loads(cls, _completed(json.dumps(head | dict(data))), "the profile")


def _completed(text: str) -> str:
    """With the defaults of what is left out."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return text  # for the error of json_file
    if not isinstance(data, dict):
        return text
    return json.dumps({"device": "cpu", "overhead": 0.0, "compiled": False} | data)


def layers_of(caller: str, model: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Name -> layer, in order.

    Raises:
        TypeError: ``model`` is no ``nn.Sequential`` and no mapping of modules, or is wrapped.
        ValueError: No layers.
    """
    named = dict(model.named_children()) if isinstance(model, nn.Sequential) else model
    if not isinstance(named, Mapping):
        if isinstance(model, nn.Module):
            checked_model(caller, model)
        raise TypeError(
            f"{caller} takes an nn.Sequential or {{name: module}} in the order in which modules run, got "
            f"{type(model).__name__}; name the parts of the model"
        )
    if not named:
        raise ValueError(f"{caller}: the model has no layers; pass one or more")
    for name, layer in named.items():
        _check_layer(caller, name, layer)
    return {str(name): layer for name, layer in named.items()}


def _check_layer(caller: str, name: str, layer: nn.Module) -> None:
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{caller}: the layer {name!r} must be a torch.nn.Module, got {type(layer).__name__}")
    checked_model(f"{caller}: the layer {name!r}", layer)
    for module in layer.modules():
        if any(kind.__name__ in _SHARDED for kind in type(module).__mro__):
            raise TypeError(f"{caller}: the layer {name!r} is sharded (FSDP); pass it as it was before, as a whole")


def profile(
    layers: nn.Module | Mapping[str, nn.Module],
    microbatch: torch.Tensor,
    *,
    repeats: int = 5,
    device: torch.device | str | None = None,
) -> LayerProfile:
    """Measures each layer of a chain on one micro-batch: time, memory, bytes. Local, and without a process group.

    Leaves no trace: parameters, gradients, buffers and torch's random numbers are as before.

    Args:
        layers: An ``nn.Sequential``, or name -> module in the order in which they run. Each takes the one tensor that
            the one before gives.
        microbatch: What the first layer takes; as large as a micro-batch of the training.
        repeats: How often each pass is timed, 1 to 1000; the median counts.
        device: Where it is measured; None: where the layers are. Layers must be there.

    Returns:
        The profile.

    Raises:
        TypeError: Layers that are wrapped, attached or sharded; a layer that gives something else than a tensor.
        ValueError: ``repeats`` is out of range, a layer that does not take what the one before gives, an output that
            does not depend on the input, a layer that uses a tensor of another one beside its input, or layers that
            share a parameter.
    """
    repeats = plain(repeats)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or not 1 <= repeats <= _MOST_REPEATS:
        raise ValueError(f"{_CALLER}: repeats must be a whole number from 1 to {_MOST_REPEATS}, got {repeats!r}")
    if not isinstance(microbatch, torch.Tensor):
        raise TypeError(f"{_CALLER}: microbatch must be a tensor, got {type(microbatch).__name__}; pass one input")
    named = layers_of(_CALLER, layers)
    check_shared(_CALLER, named)
    parameters = [parameter for layer in named.values() for parameter in layer.parameters()]
    found = parameters[0].device if parameters else microbatch.device
    if device is not None and torch.device(device).type != found.type:
        raise ValueError(f"{_CALLER}: device is {device}, and the layers are on {found}; move them first")
    chain = LayerChain(_CALLER, named, microbatch.detach().to(found), Stopwatch(found))
    with without_trace(list(named.values()), found):
        kept = chain.kept_bytes()
        chain.check_neighbours()
        runs = [chain.run() for _ in range(repeats + 1)][1:]  # the first one warms up
    made = []
    for place, (name, layer) in enumerate(named.items()):
        forward, inputs, whole = (statistics.median(run[place][part] for run in runs) for part in range(3))
        made.append(
            Layer(
                name=name,
                forward=forward,
                backward_input=min(inputs, whole),
                backward_weight=max(0.0, whole - inputs),
                kept_bytes=kept[place],
                output_bytes=chain.output_bytes[place],
                parameter_bytes=sum(parameter.nbytes for parameter in layer.parameters()),
            )
        )
    return LayerProfile(tuple(made), device=found.type, compiled=any(map(is_compiled, named.values())))


def is_compiled(layer: nn.Module) -> bool:
    """Whether ``torch.compile`` has made it, or a part of it."""
    modules = list(layer.modules())
    return any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules)


def check_shared(caller: str, named: Mapping[str, nn.Module]) -> None:
    """Each layer has parameters of its own.

    Raises:
        ValueError: Two share one.
    """
    owners: dict[int, str] = {}
    for name, layer in named.items():
        for parameter in layer.parameters():
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                raise ValueError(
                    f"{caller}: the layers {owner!r} and {name!r} share a parameter, and stages do not; give each its "
                    "own, or make one layer of all from the one to the other"
                )
