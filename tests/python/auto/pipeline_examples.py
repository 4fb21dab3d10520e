"""Chains of layers that were not measured, and models of a few layers: what the tests of pipelines plan with."""

from __future__ import annotations

import random

import torch
from torch import nn

from torchext.auto import LinkModel
from torchext.auto.pipeline import Layer, LayerProfile

LINK = LinkModel.of(latency=1e-4, bandwidth=125e6)


def chain(layers: int = 8, *, kept: int = 1000, output: int = 0, parameters: int = 100) -> LayerProfile:
    """Equal layers with a backward pass twice as long as the forward pass."""
    return LayerProfile(
        tuple(
            Layer(
                name=f"layer{number}",
                forward=0.001,
                backward_input=0.001,
                backward_weight=0.001,
                kept_bytes=kept,
                output_bytes=output,
                parameter_bytes=parameters,
            )
            for number in range(layers)
        )
    )


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def random_table(draw: random.Random) -> tuple[tuple[tuple[str, ...], ...], int]:
    """A table that can go on, and its micro-batches: actions that are possible, in any order."""
    stages, microbatches = draw.randint(1, 5), draw.randint(1, 6)
    forward, backward, weights = [0] * stages, [0] * stages, [0] * stages
    splits = [draw.random() < 0.5 for _ in range(stages)]
    rows: list[list[str]] = [[] for _ in range(stages)]
    while any(done < microbatches for done in weights):
        possible = []
        for stage in range(stages):
            if forward[stage] < microbatches and (stage == 0 or forward[stage - 1] > forward[stage]):
                possible.append((stage, "F", forward))
            if backward[stage] < forward[stage] and (stage == stages - 1 or backward[stage + 1] > backward[stage]):
                possible.append((stage, "I" if splits[stage] else "B", backward))
            if splits[stage] and weights[stage] < backward[stage]:
                possible.append((stage, "W", weights))
        stage, kind, done = draw.choice(possible)
        rows[stage].append(f"{stage}{kind}{done[stage]}")
        done[stage] += 1
        if kind == "B":
            weights[stage] += 1
    return tuple(map(tuple, rows)), microbatches
