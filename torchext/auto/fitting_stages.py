"""Says how a model that does not fit one rank's memory would fit several: as the stages of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torchext.auto.link_model import shown_bytes
from torchext.auto.step_profile import ParameterProfile, Profile

__all__ = ["stages_that_fit"]


def stages_that_fit(profile: Profile, memory: float, ranks: int, *, state_tensors: int) -> str:
    """What to do: the least number of stages that divides the ranks, or that no number of them is enough.

    Activations are not known here, and come on top. A frozen parameter may be in any stage, so each has room for all.

    Args:
        profile: Of the model.
        memory: Of a rank, in bytes.
        ranks: On which the model is trained.
        state_tensors: Of the optimizer, for each parameter.
    """
    room = memory - max(0, profile.parameter_bytes - profile.gradient_bytes)
    copies = 2 + state_tensors  # with the gradient
    backwards = profile.parameters[::-1]  # of one span the gradient that is ready last belongs to what runs first
    forward = sorted(backwards, key=lambda parameter: parameter.first_use)
    for count in range(2, ranks + 1):
        if ranks % count == 0:
            stages = _cut(forward, count)
            if len(stages) == count and all(copies * _nbytes(stage) < room for stage in stages):
                return (
                    f"cut the model: a Placement of {count} stages on {ranks // count} rank{'s' * (ranks > count)} "
                    f"each has room beside activations, with {_described(stages, copies)}; "
                    "torchext.auto.pipeline.plan counts activations, too"
                )
    return f"take more ranks: no pipeline over {ranks} has room"


def _cut(parameters: Sequence[ParameterProfile], count: int) -> list[list[ParameterProfile]]:
    """Runs of layers, cut where each has its share of the bytes; fewer than ``count`` where layers are too coarse."""
    whole, done = _nbytes(parameters), 0
    stages: list[list[ParameterProfile]] = [[] for _ in range(count)]
    for _, layer in itertools.groupby(parameters, key=lambda parameter: parameter.first_use):
        own = list(layer)
        middle = done + _nbytes(own) / 2
        stages[min(count - 1, int(middle * count / whole))] += own
        done += _nbytes(own)
    return [stage for stage in stages if stage]


def _nbytes(parameters: Sequence[ParameterProfile]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _described(stages: Sequence[Sequence[ParameterProfile]], copies: int) -> str:
    return ", ".join(
        f"{stage[0].name} .. {stage[-1].name} ({shown_bytes(copies * _nbytes(stage))})" for stage in stages
    )
