"""A model profile says when a model's gradients are ready, and when its parameters are used first."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchext.auto import json_file

__all__ = ["ParameterProfile", "Profile"]


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
    """What :func:`torchext.auto.profile` measures of a model.

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
