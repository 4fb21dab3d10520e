"""FIITED in plain Python, which masks a whole table: slow, and independent of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

EPS = 1e-8


class Reference:
    """FIITED with masks: every chunk has values; those outside the mask read as zero and are not trained.

    The optimizers are lazy: a chunk without a gradient in a step keeps its value and its state.
    """

    def __init__(
        self,
        rows: int,
        chunks: int,
        width: int,
        capacity: int,
        lr: float,
        gamma: float,
        *,
        optimizer: str = "adagrad",
        mode: str = "sum",
        padding: int | None = None,
    ) -> None:
        self.rows, self.chunks, self.width, self.capacity = rows, chunks, width, capacity
        self.lr, self.gamma, self.optimizer, self.mode, self.padding = lr, gamma, optimizer, mode, padding
        keys = range(rows * chunks)
        self.values: dict[int, list[float]] = {}
        self.sums: dict[int, float] = {}
        self.moments: dict[int, list[tuple[float, float]]] = {}
        self.utility = dict.fromkeys(keys, 0.0)
        self.resident: set[int] = set()
        self.steps = 0
        self.forget(keys)

    def forget(self, keys: Iterable[int]) -> None:
        """Values and the optimizer's state begin anew."""
        for key in keys:
            self.values[key] = [0.0] * self.width
            self.sums[key] = 0.0
            self.moments[key] = [(0.0, 0.0)] * self.width

    def vector(self, row: int) -> list[float]:
        keys = range(row * self.chunks, (row + 1) * self.chunks)
        return [value if key in self.resident else 0.0 for key in keys for value in self.values[key]]

    def shares(self, ids: list[int], weights: list[float] | None) -> list[list[float]]:
        """How much of each column of each position is in the bag."""
        dim = self.chunks * self.width
        counted = [place for place, row in enumerate(ids) if row != self.padding]
        if self.mode == "max":
            vectors = [self.vector(row) for row in ids]
            largest = [max(counted, key=lambda p, i=i: vectors[p][i], default=-1) for i in range(dim)]
            return [[float(place == at) for at in largest] for place in range(len(ids))]
        factors = (
            weights
            if weights is not None
            else [1 / len(counted) if self.mode == "mean" and counted else 1.0] * len(ids)
        )
        return [[factors[place] if place in counted else 0.0] * dim for place in range(len(ids))]

    def bag(self, ids: list[int], weights: list[float] | None = None) -> list[float]:
        out = [0.0] * (self.chunks * self.width)
        for row, share in zip(ids, self.shares(ids, weights), strict=True):
            out = [total + part * value for total, part, value in zip(out, share, self.vector(row), strict=True)]
        return out

    def weight_gradient(self, ids: list[int], upstream: list[float]) -> list[float]:
        return [
            0.0 if row == self.padding else sum(u * v for u, v in zip(upstream, self.vector(row), strict=True))
            for row in ids
        ]

    def train(
        self, bags: list[list[int]], upstream: list[list[float]], weights: list[list[float]] | None = None
    ) -> None:
        gradients: dict[int, list[float]] = {}
        accesses: dict[int, int] = {}
        given = weights if weights is not None else [None] * len(bags)
        for ids, gradient, own in zip(bags, upstream, given, strict=True):
            for row, share in zip(ids, self.shares(ids, own), strict=True):
                if row == self.padding:
                    continue
                accesses[row] = accesses.get(row, 0) + 1
                total = gradients.setdefault(row, [0.0] * len(gradient))
                gradients[row] = [t + part * u for t, part, u in zip(total, share, gradient, strict=True)]
        self.steps += 1
        for key in self.utility:
            self.utility[key] *= self.gamma
        for row, gradient in gradients.items():
            for chunk in range(self.chunks):
                key = row * self.chunks + chunk
                part = gradient[chunk * self.width : (chunk + 1) * self.width]
                self.utility[key] += accesses[row] * math.sqrt(sum(value * value for value in part))
                if key in self.resident:
                    changes = self.changes(key, part)
                    self.values[key] = [w - change for w, change in zip(self.values[key], changes, strict=True)]

    def changes(self, key: int, gradient: list[float]) -> list[float]:
        if self.optimizer == "sgd":
            return [self.lr * g for g in gradient]
        if self.optimizer == "adagrad":  # row-wise, a chunk
            self.sums[key] += sum(g * g for g in gradient) / self.width
            return [self.lr * g / (math.sqrt(self.sums[key]) + EPS) for g in gradient]
        pairs = zip(self.moments[key], gradient, strict=True)
        self.moments[key] = [(0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g) for (m, v), g in pairs]
        rate = self.lr * math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        return [rate * m / (math.sqrt(v) + EPS) for m, v in self.moments[key]]

    def prune(self) -> None:
        order = sorted(self.utility, key=lambda key: (-self.utility[key], key not in self.resident, key))
        chosen = [key for key in order if self.utility[key] > 0 or key in self.resident][: self.capacity]
        self.hold(set(chosen))

    def hold(self, chosen: set[int]) -> None:
        """These chunks are resident from now on."""
        self.forget(chosen - self.resident)
        self.resident = chosen

    def weight(self) -> Tensor:
        made = torch.zeros(self.rows * self.chunks, self.width, dtype=torch.float64)
        for key in self.resident:
            made[key] = torch.tensor(self.values[key], dtype=torch.float64)
        return made.view(self.rows, -1)
