"""With "dear" the optimizer steps what has arrived while the rest is on its way: the same as stepping all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from sharded import SIZES, Pair, made
from torch import nn

from torchext.dear.dear_refusals import ELEMENTWISE


def layers() -> nn.Module:
    """Each in a bucket of its own."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


class SlowCore:
    """A synchronizer's core on a slow network: the optimizer sees buckets arrive one after the other."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.parts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def arrived_buckets(self, known: int) -> int:
        self.parts += 1
        assert self._core.arrived_buckets(self.bucket_count) == self.bucket_count  # they all do
        return min(known + 1, int(self.bucket_count))


def body_in_parts(rank: Rank) -> dict[str, tuple[int, int]]:
    rank.init("gloo")
    found = {}
    cases = [(kind, {}) for kind in ELEMENTWISE] + [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {})]
    for kind, options in cases:
        of_steps = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        pairs = [Pair(rank, made(layers), lambda p: kind(p, lr=0.01, **options, **of_steps)) for _ in range(2)]  # noqa: B023
        pairs[1].run(4)  # the plan is made in the first steps
        pairs[0].run(4)
        pairs[1].sync._steps[0]._core = core = SlowCore(pairs[1].sync._steps[0]._core)
        seen: list[bool] = []
        pairs[1].optimizer.register_step_pre_hook(lambda o, *_: seen.extend(p.grad is not None for p in stepped(o)))  # noqa: B023
        for pair in pairs:
            pair.run(4)
            pair.sync.wait()
        for one, other in zip(pairs[0].module.parameters(), pairs[1].module.parameters(), strict=True):
            assert torch.equal(one, other), kind.__name__
        assert all(seen)
        found[f"{kind.__name__} {options}"] = (core.parts, int(core.bucket_count))
        for pair in pairs:
            assert pair.done() < 1e-2  # Rprop goes by signs
    return found


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("size", SIZES)
def test_what_arrives_first_is_stepped_first_and_comes_out_the_same(size: int) -> None:
    for found in run_ranks(body_in_parts, size, deadline=100):
        check_parts(found)


def check_parts(found: dict[str, tuple[int, int]]) -> None:
    for name, (parts, buckets) in found.items():
        assert buckets > 2, name
        assert parts == 4 * buckets, name  # one question for each bucket, in each of the steps
