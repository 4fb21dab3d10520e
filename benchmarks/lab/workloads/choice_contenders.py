"""Ways to train a model that emulates compute: those that `torchext.auto` chooses among, and inexact ones beside."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.report.results import Checks
from lab.run.rank import Rank
from lab.workloads import emulated

REFERENCE = "ddp default"
DEAR = ("dear replicated", "dear sharded")
EXACT = (REFERENCE, "ddp program", *DEAR, *(f"{name} hierarchical" for name in DEAR))  # the last where there are racks
INEXACT = ("bf16 (inexact)", "PowerSGD (inexact)", "PostLocalSGD 4 (inexact)")
CONTENDERS = (*EXACT, "apply", *INEXACT)
LEARNING_RATE = 1e-3
WIDTH = 64  # of the layers' matrices
PERIOD = 4  # of PostLocalSGD
LOCAL_FROM = 2  # steps before it, and before PowerSGD
WARMUP_STEPS = 4
_LEAD_STEPS = 2
TOLERANCE = {"bf16 (inexact)": 1e-2, "PowerSGD (inexact)": 1e-2}
EXACT_TOLERANCE = 1e-4
_groups: list[Any] = []  # kept until the process ends


class Job:
    """One model in one network, on one rank: makes it anew for every contender, and trains it."""

    def __init__(self, rank: Rank, settings: Mapping[str, Any], checks: Checks) -> None:
        self.rank, self.settings, self.checks = rank, settings, checks
        self.plan: Any = None
        self.decided = ""

    def model(self) -> emulated.EmulatedModel:
        model = emulated.EmulatedModel(**self.settings["workload"])
        model.set_gradient((self.rank.rank + 1) / self.rank.world_size)
        for layer in model.body:
            rows = max(1, layer.weight.numel() // WIDTH)
            layer.weight = nn.Parameter(torch.zeros(rows, WIDTH))
        if self.rank.rank == self.rank.world_size - 1:
            model.clock.factor = self.settings["slow"]
        return model

    def make_plan(self, link: Any) -> Any:
        """Returns the link that was measured, or was given."""
        from torchext import auto

        self.plan = auto.plan(self.model(), _step, link=link)
        return self.plan.link

    def choosing(self, name: str) -> Any:
        """Returns the plan with another choice."""
        found = tuple(
            dataclasses.replace(candidate, chosen=named(candidate) == name) for candidate in self.plan.candidates
        )
        return dataclasses.replace(self.plan, candidates=found)

    def measure(self, name: str) -> list[float]:
        """Trains in a session of its own; returns the milliseconds of each step."""
        with self.rank.process_group("gloo"):
            training = self.training(name)
            training.run(WARMUP_STEPS)
            error = training.error()
            self.checks.confirm(name, error, TOLERANCE.get(name, EXACT_TOLERANCE))
            if name == "apply" and not self.decided:
                self.decide(training)
            self.checks.require(name)
            self.rank.board.start_together()
            # What dear gathers under a forward pass is the step's before: none may be missing in front.
            milliseconds = training.run(_LEAD_STEPS + self.settings["steps"])[_LEAD_STEPS:]
            training.end()
        return milliseconds

    def training(self, name: str) -> Training:
        model = self.model()
        if name in INEXACT:
            return {INEXACT[0]: Bf16, INEXACT[1]: PowerSGD, INEXACT[2]: PostLocalSGD}[name](model, self.rank)
        if name == "apply" and not self.decided:
            return Applied(model, self.rank, self.plan, compare=True)
        return Applied(model, self.rank, self.choosing(self.decided if name == "apply" else name), compare=False)

    def decide(self, training: Training) -> None:
        """Trains until dear has compared the plan's buckets with plain all-reduce; plain DDP has decided already."""
        chosen = self.plan.chosen
        while not training.sync.stats().get("decided", True):
            training.run(1)
        fallen_back = chosen.way == "dear" and training.sync.stats()["mode"] == "allreduce"
        self.decided = REFERENCE if fallen_back else named(chosen)


def _step(model: Any) -> None:
    model(torch.zeros(1)).sum().backward()


class Training:
    """A model that is trained by plain DDP; the others derive from it."""

    def __init__(self, module: emulated.EmulatedModel, rank: Rank) -> None:
        self.module, self.rank, self.steps = module, rank, 0
        self.sync: Any = None
        self.optimizer: Any = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        self.model = self.wrap()

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.module, init_sync=False)

    def run(self, steps: int) -> list[float]:
        """Returns the milliseconds of each step."""
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.optimizer.zero_grad()
            _step(self.model)
            self.optimizer.step()
            self.steps += 1
            ends.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in itertools.pairwise(ends)]

    def settle(self) -> None:
        """Makes the replicas equal."""

    def end(self) -> None:
        """Leaves the algorithm."""

    def error(self) -> float:
        """Returns how far the replicas are from where gradient descent takes them, relative to the way."""
        self.settle()
        world = self.rank.world_size
        expected = -LEARNING_RATE * self.steps * (world + 1) / (2 * world)
        worst = max(float((p.detach().double() - expected).abs().max()) for p in self.module.parameters())
        found = torch.tensor([worst / abs(expected)], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()


class Applied(Training):
    """By a plan. compare: with dear's own comparison, as a script has it; else by the plan's buckets at once."""

    def __init__(self, module: emulated.EmulatedModel, rank: Rank, plan: Any, *, compare: bool) -> None:
        self.plan, self.compare = plan, compare
        super().__init__(module, rank)

    def wrap(self) -> nn.Module:
        import torchext

        arguments: dict[str, Any] = {}
        if self.plan.chosen.way == "dear" and not self.compare:
            chosen = self.plan.chosen
            transport = "hierarchical" if chosen.transport == "hierarchical" else "auto"
            options = torchext.DeAROptions(form=chosen.form, transport=transport, allreduce_fallback=False)
            group = dist.new_group(backend="dear", pg_options=options)
            arguments = {"process_group": group, "trust": True}  # the plan's link is Gloo's
        ddp, self.sync = self.plan.apply(self.module, self.optimizer, init_sync=False, **arguments)
        return ddp

    def settle(self) -> None:
        self.sync.synchronize()

    def end(self) -> None:
        self.sync.detach()


class Bf16(Training):
    """Gradients travel in bfloat16."""

    def wrap(self) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        ddp = DistributedDataParallel(self.module, init_sync=False)
        ddp.register_comm_hook(None, bf16_compress_hook)
        return ddp


class PowerSGD(Training):
    """Gradients travel as two factors of rank 1."""

    def wrap(self) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        # One bucket: the hook all-reduces anew in callbacks, and Gloo's threads may order those of two buckets
        # differently on each rank, which then wait for each other.
        ddp = DistributedDataParallel(self.module, init_sync=False, bucket_cap_mb=4096)
        state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=LOCAL_FROM)
        ddp.register_comm_hook(state, powerSGD_hook)
        # The hook's callbacks own the group, too. Were one the last owner, Gloo's thread would join itself.
        _groups.append(dist.group.WORLD)
        return ddp


class PostLocalSGD(Training):
    """Gradients stay local, and parameters are averaged every few steps."""

    def wrap(self) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        ddp = DistributedDataParallel(self.module, init_sync=False)
        own, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(None, own, start_localSGD_iter=LOCAL_FROM, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=LOCAL_FROM)
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)
        return ddp

    def settle(self) -> None:
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        average_parameters(iter(self.module.parameters()), dist.group.WORLD)


def possible(plan: Any, name: str) -> bool:
    """Returns whether the plan has such a candidate, and it can train the model."""
    return any(named(c) == name and c.possible for c in plan.candidates)


def named(candidate: Any) -> str:
    """Returns the name of the contender that trains by a candidate of a plan."""
    transport = f" {candidate.transport}" * (candidate.transport == "hierarchical")
    return f"{candidate.way} {candidate.form}{transport}"
