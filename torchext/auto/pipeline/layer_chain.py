"""Runs a chain of layers on one micro-batch: what they keep, how long they take, and whether they are a chain."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchext.auto.step_profile import Stopwatch

__all__ = ["LayerChain", "without_trace"]


class LayerChain:
    """Layers, and one micro-batch that runs through them.

    Args:
        caller: Whose errors these are.
        layers: Name -> layer, in order.
        microbatch: What the first layer takes.
        watch: Of the layers' device.
    """

    def __init__(
        self, caller: str, layers: Mapping[str, nn.Module], microbatch: torch.Tensor, watch: Stopwatch
    ) -> None:
        self._caller = caller
        self._layers, self._microbatch, self._watch = layers, microbatch, watch
        self.output_bytes: list[int] = []

    def kept_bytes(self) -> list[int]:
        """Of each layer what it saves for the backward pass; what several save counts for the first of them."""
        tensors = [t for layer in self._layers.values() for t in (*layer.parameters(), *layer.buffers())]
        seen = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, self._microbatch)}
        kept = []
        with torch.enable_grad():
            x, before = self._microbatch, ""
            alive: list[torch.Tensor] = []  # so that no storage takes the place of another
            for name, layer in self._layers.items():
                total = 0

                def pack(tensor: torch.Tensor) -> torch.Tensor:
                    nonlocal total
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        alive.append(tensor.detach())
                        total += storage.nbytes()
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    x = self._called(name, layer, x, before)
                alive.append(x.detach())
                self.output_bytes.append(x.nbytes)
                kept.append(total)
                before = name
        return kept

    def check_neighbours(self) -> None:
        """Each layer computes with its input and its own parameters only.

        Raises:
            ValueError: A layer uses a tensor that another one has put aside, past what stages hand on.
        """
        owners = {id(p): name for name, layer in self._layers.items() for p in layer.parameters()}
        inputs: list[torch.Tensor] = []  # kept, so that an id stays that of one tensor
        x = self._microbatch
        for name, layer in self._layers.items():
            x = self._fresh(x)
            inputs.append(x)
            owners[id(x)] = name
            with torch.enable_grad():
                x = layer(x.clone())
            for leaf in _leaves(x):
                owner = owners.get(id(leaf), name)
                if owner != name:
                    raise ValueError(
                        f"{self._caller}: the layer {name!r} uses a tensor of {owner!r} that is not its input; layers "
                        "must be a chain, for torch's stages talk to their neighbours only: make one layer of all from "
                        f"{owner!r} to {name!r}"
                    )

    def _fresh(self, x: torch.Tensor) -> torch.Tensor:
        """An input without a past. Nobody wants the gradient of what the first layer gets."""
        fresh = x.detach()
        return fresh.requires_grad_(x is not self._microbatch and (x.is_floating_point() or x.is_complex()))

    def run(self) -> list[tuple[float, float, float]]:
        """Seconds of each layer: forward, backward to the input, whole backward."""
        times = []
        x = self._microbatch
        for name, layer in self._layers.items():
            x = self._fresh(x)
            with torch.enable_grad():
                taken = x.clone()  # a layer may write into what it gets
                forward, out = self._timed(functools.partial(layer, taken))
            times.append((forward, *self._backward(name, layer, x, out)))
            x = out
        return times

    def _backward(self, name: str, layer: nn.Module, x: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
        wanted: list[torch.Tensor] = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        if not out.requires_grad:
            if x.requires_grad:
                self._raise_independent(name)
            return 0.0, 0.0
        gradient = torch.ones_like(out)
        inputs = 0.0
        if x.requires_grad:
            inputs, found = self._timed(
                lambda: torch.autograd.grad(out, x, gradient, retain_graph=True, allow_unused=True)
            )
            if found[0] is None:
                self._raise_independent(name)
        whole, _ = self._timed(
            lambda: torch.autograd.grad(out, [x] * x.requires_grad + wanted, gradient, allow_unused=True)
        )
        return inputs, whole

    def _timed(self, call: Any) -> tuple[float, Any]:
        self._watch.wait()
        begin = self._watch.mark()
        value = call()
        end = self._watch.mark()
        self._watch.wait()
        return self._watch.seconds(begin, end), value

    def _raise_independent(self, name: str) -> None:
        raise ValueError(
            f"{self._caller}: what the layer {name!r} gives does not depend on what it gets; layers must be a chain, "
            "for torch's stages talk to their neighbours only"
        )

    def _called(self, name: str, layer: nn.Module, x: torch.Tensor, before: str) -> torch.Tensor:
        try:
            out = layer(x)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if not before:
                raise
            raise ValueError(
                f"{self._caller}: the layer {name!r} does not take what {before!r} gives, a tensor of shape "
                f"{tuple(x.shape)} and type {x.dtype}; layers must be a chain, for torch's stages talk to their "
                f"neighbours only: {error}"
            ) from error
        if not isinstance(out, torch.Tensor):
            raise TypeError(
                f"{self._caller}: the layer {name!r} gives {type(out).__name__}, and stages hand one tensor on; let it "
                "return a tensor"
            )
        return out


def _leaves(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors of which autograd would accumulate a gradient in a backward pass from here."""
    seen: set[Any] = set()
    left = [out.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        left += [parent for parent, _ in node.next_functions]


@contextlib.contextmanager
def without_trace(layers: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Puts buffers and random numbers back; gradients are not touched inside."""
    modules = [(module, dict(module._buffers)) for layer in layers for module in layer.modules()]
    buffers = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for module, own in modules:
                module._buffers.update(own)
            for buffer, value in buffers:
                buffer.copy_(value)
