"""Groups that are destroyed without ``detach()``, and models that are attached again: nothing stays behind."""

from __future__ import annotations

import gc
import operator
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS
from beside_ddp import ATTACHED
from harness import Rank, run_ranks
from rows import row_values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

ROUNDS = 6


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def held_in_the_end(most: tuple[int, int]) -> tuple[int, int]:
    """The same, once it is no more than that: what ends late has ten seconds."""
    end = time.monotonic() + 10
    while any(map(operator.gt, now := held(), most)) and time.monotonic() < end:
        time.sleep(0.01)
    return now


class Rounds:
    """One module and one optimizer, trained in one group after the other."""

    def __init__(self, form: str, momentum: float) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=momentum)
        self.backend, self.options = ATTACHED[form]

    def train(self, steps: int = 3) -> None:
        limit = timedelta(seconds=30)
        options = OPTIONS[self.backend](timeout=limit, **self.options)
        group = dist.new_group(backend=self.backend, timeout=limit, pg_options=options)
        ddp = DistributedDataParallel(self.net, process_group=group)
        torchext.attach(ddp, self.optimizer)
        for _ in range(steps):
            self.optimizer.zero_grad()
            ddp(torch.ones(5, 4)).square().mean().backward()
            self.optimizer.step()
        dist.barrier()
        dist.destroy_process_group(group)


def body_rounds(rank: Rank, form: str) -> list[tuple[int, int]]:
    rank.init("gloo")
    rounds, seen = Rounds(form, momentum=0.9 if form == "dear-replicated" else 0.0), []
    for _ in range(ROUNDS):
        rounds.train()
        gc.collect()
        seen.append(held())
    return [*seen, held_in_the_end(seen[1])]


def test_nothing_stays_of_groups_that_were_destroyed() -> None:
    for form, both in row_values(body_rounds, 2, {form: (form,) for form in ATTACHED}).items():
        for seen in both:
            descriptors, threads = zip(*seen, strict=True)
            assert descriptors[-1] <= descriptors[1] and threads[-1] <= threads[1], (form, seen)


def body_slices(rank: Rank) -> Any:
    rank.init("gloo")
    rounds = Rounds("dear-sharded", momentum=0.9)
    rounds.train()
    with pytest.raises(ValueError, match=r"is in slices, .* call sync\.detach\(\) before destroy_process_group\(\)"):
        rounds.train()
    return True


def test_state_in_slices_of_a_group_that_was_destroyed() -> None:
    assert run_ranks(body_slices, 2) == [True, True]
