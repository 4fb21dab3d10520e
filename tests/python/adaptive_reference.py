"""FIITED in plain Python, which masks a whole table: slow, and independent of the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Reference:
    """FIITED with masks: every chunk has values; those outside the mask read as zero and are not trained."""

    def __init__(self, rows: int, chunks: int, width: int, capacity: int, lr: float, gamma: float) -> None:
        self.rows, self.chunks, self.width, self.capacity = rows, chunks, width, capacity
        self.lr, self.gamma = lr, gamma
        keys = range(rows * chunks)
        self.values = {key: [0.0] * width for key in keys}
        self.sums = dict.fromkeys(keys, 0.0)
        self.utility = dict.fromkeys(keys, 0.0)
        self.resident: set[int] = set()

    def bag(self, ids: list[int]) -> list[float]:
        out = [0.0] * (self.chunks * self.width)
        for row in ids:
            for chunk in range(self.chunks):
                key = row * self.chunks + chunk
                if key in self.resident:
                    for i, value in enumerate(self.values[key]):
                        out[chunk * self.width + i] += value
        return out

    def train(self, bags: list[list[int]], upstream: list[list[float]]) -> None:
        gradients: dict[int, list[float]] = {}
        accesses: dict[int, int] = {}
        for ids, gradient in zip(bags, upstream, strict=True):
            for row in ids:
                accesses[row] = accesses.get(row, 0) + 1
                total = gradients.setdefault(row, [0.0] * len(gradient))
                for i, value in enumerate(gradient):
                    total[i] += value
        for key in self.utility:
            self.utility[key] *= self.gamma
        for row, gradient in gradients.items():
            for chunk in range(self.chunks):
                key = row * self.chunks + chunk
                part = gradient[chunk * self.width : (chunk + 1) * self.width]
                squares = sum(value * value for value in part)
                self.utility[key] += accesses[row] * math.sqrt(squares)
                if key in self.resident:
                    self.sums[key] += squares / self.width
                    rate = self.lr / (math.sqrt(self.sums[key]) + 1e-8)
                    self.values[key] = [w - rate * g for w, g in zip(self.values[key], part, strict=True)]

    def prune(self) -> None:
        order = sorted(self.utility, key=lambda key: (-self.utility[key], key not in self.resident, key))
        chosen = [key for key in order if self.utility[key] > 0 or key in self.resident][: self.capacity]
        for key in set(chosen) - self.resident:
            self.values[key], self.sums[key] = [0.0] * self.width, 0.0
        self.resident = set(chosen)

    def weight(self) -> Tensor:
        made = torch.zeros(self.rows * self.chunks, self.width, dtype=torch.float64)
        for key in self.resident:
            made[key] = torch.tensor(self.values[key], dtype=torch.float64)
        return made.view(self.rows, -1)
