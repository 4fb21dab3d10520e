"""Pipelines by plan train as one process does: losses and gradients, whatever the order, depth and data width."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, launch, run_ranks
from largest import largest
from rows import values_in_turn
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.auto import LinkModel, pipeline
from torchext.auto.pipeline import PipelinePlan, Placement, Stage, torch_runtime
from torchext.auto.pipeline.placement import action

MICROBATCHES, BATCH = 6, 12


def network(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    # The fourth gives what it gets: a view.
    kinds = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Flatten(), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*kinds[:layers])


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out * target).sum(1).mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 + step)
    return torch.randn(BATCH, 8), torch.randn(BATCH, 8)


def zero_bubble(sizes: list[int], depths: list[int], **options: Any) -> Placement:
    """Input gradients before forwards before weight gradients, as deep as is allowed."""
    placement = Placement.by_depth(sizes, depths, MICROBATCHES)
    rows = []
    for stage, depth in enumerate(depths):
        kinds = [("F", number) for number in range(depth)]
        for number in range(MICROBATCHES):
            kinds.append(("I", number))
            if number > 0:
                kinds.append(("W", number - 1))
            if depth + number < MICROBATCHES:
                kinds.append(("F", depth + number))
        kinds.append(("W", MICROBATCHES - 1))
        rows.append(tuple(action(stage, *entry) for entry in kinds))
    stages = tuple(replace(stage, **options) for stage in placement.stages)
    return Placement(stages, MICROBATCHES, "zero-bubble", tuple(rows))


def expected(steps: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """One process: of each step the loss and all gradients."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))  # type: ignore[union-attr]
        optimizer.step()
    return found


def train(placement: Placement, pp: Any, dp: Any = None, model: nn.Sequential | None = None) -> Any:
    """Two steps of a placement; returns the class of the schedule."""
    model = model or network()
    number = pp.rank()
    stage_of = placement.stages[number]
    layers = {str(place): model[place] for place in range(stage_of.first, stage_of.last + 1)}
    stage = torch_runtime.make_stage(placement, layers, number, pp, dp)
    schedule = torch_runtime.make_schedule(placement, stage, loss_of)
    module = stage.submod.module if isinstance(stage.submod, DistributedDataParallel) else stage.submod
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1) if parameters else None
    width, part = (1, 0) if dp is None else (dp.size(), dp.rank())
    for step, (loss, gradients) in enumerate(expected(2)):
        x, y = (whole.chunk(width)[part] for whole in batch(step))
        losses: list[torch.Tensor] = []
        if optimizer is not None:
            optimizer.zero_grad()
        schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None, losses=losses)
        if stage.is_last:
            mean = torch.stack(losses).mean().detach()
            if dp is not None:
                dist.all_reduce(mean, group=dp)
            assert abs(mean.item() / width - loss) < 1e-5
        assert set(parameters) == {name for name in gradients if name.split(".")[0] in layers}
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-5, msg=f"{step} {name}")
        if optimizer is not None:
            optimizer.step()
    return type(schedule).__name__, stage


def body_two(rank: Rank) -> list[str]:
    rank.init("gloo")
    pp = dist.group.WORLD
    found = []
    for placement in (
        Placement.by_depth([2, 4], [2, 1], MICROBATCHES),  # strict 1F1B, as a table
        Placement.by_depth([5, 1], [5, 2], MICROBATCHES),  # uneven and deep
        Placement.by_depth([1, 5], [MICROBATCHES] * 2, MICROBATCHES, order="gpipe"),
        zero_bubble([4, 2], [3, 2]),
        zero_bubble([2, 4], [2, 1], recompute=True),
    ):
        found.append(train(placement, pp)[0])
    recomputed = Placement.by_depth([3, 3], [3, 1], MICROBATCHES)
    recomputed = replace(recomputed, stages=tuple(replace(stage, recompute=True) for stage in recomputed.stages))
    found.append(train(recomputed, pp)[0])
    dist.destroy_process_group()
    return found


def body_four(rank: Rank) -> list[str]:
    rank.init("gloo")
    found = []
    for placement in (zero_bubble([1, 2, 2, 1], [6, 5, 3, 1]), Placement.by_depth([2, 1, 1, 2], [4, 4, 2, 1], 6)):
        found.append(train(placement, dist.group.WORLD)[0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp, dp = mesh["pp"].get_group(), mesh["dp"].get_group()
    # Several buckets, so that DDP sorts them anew after the first step.
    by_depth = Placement.by_depth([3, 3], [4, 1], MICROBATCHES, data=2)
    by_depth = replace(by_depth, stages=tuple(replace(stage, sync=(256, 256)) for stage in by_depth.stages))
    for placement in (
        by_depth,
        zero_bubble([3, 3], [4, 2], data=2, sync=(256, 64)),
        Placement.by_depth([4, 2], [MICROBATCHES] * 2, MICROBATCHES, data=2, order="gpipe"),
    ):
        _, stage = train(placement, pp, dp)
        found.append(type(stage).__name__)
        if isinstance(stage.submod, DistributedDataParallel):
            optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
            with pytest.raises(TypeError, match=r"this model is stage \d of a pipeline"):
                torchext.attach(stage.submod, optimizer)
    whole = Placement((Stage(0, 5, data=4),), 3, "1f1b", Placement.by_depth([6], [1], 3).table)
    groups = [dist.new_group([one]) for one in range(4)]
    found.append(train(whole, groups[rank.rank], dist.group.WORLD)[0])
    dist.destroy_process_group()
    return found


def test_four_ranks_train_as_one_process() -> None:
    first, second, *_ = run_ranks(body_four, 4)
    runtime = "_PipelineScheduleRuntime"
    assert first == [runtime, runtime, "PipelineStage", "PipelineStage", "PipelineStage", runtime]
    assert second == [runtime, runtime, "PipelineStage", "_AveragingStage", "PipelineStage", runtime]


def body_plan(rank: Rank, folder: str) -> dict[str, Any]:
    rank.init("gloo")
    world = dist.group.WORLD
    model, path = network(), Path(folder) / "plan.json"
    if rank.rank == 0:  # times differ from rank to rank: one plans
        profile = pipeline.profile(model, torch.zeros(2, 8), repeats=2)
        link = LinkModel.of(latency=1e-3, bandwidth=1e8)
        pipeline.plan(profile, link, world_size=2, microbatches=MICROBATCHES, stages=2).save(path)
    dist.barrier()
    plan = PipelinePlan.load(path)
    stage = plan.stage(model, world)
    schedule = plan.schedule(stage, loss_of)
    x, y = batch(0)

    def step() -> None:
        schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)

    step()
    gradients = expected(1)[0][1]
    for name, parameter in stage.submod.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-5)
    depths = None
    if hasattr(pipelining, "analyze_pipeline_activation_liveness") and hasattr(schedule, "pipeline_order_with_comms"):
        depths = tuple(
            pipelining.analyze_pipeline_activation_liveness(
                schedule, pp_rank=number, stage_indices=[number], granularity="stage_microbatch"
            ).num_slots
            for number in range(2)
        )
    other = PipelinePlan.of(plan.profile, plan.link, Placement.by_depth([1, 5], [rank.rank + 2, 1], MICROBATCHES))
    with pytest.raises(ValueError, match=r"schedule: plan is .* on rank 0 and .* on rank 1; pass the same everywhere"):
        other.schedule(stage, loss_of)
    wide = PipelinePlan.of(plan.profile, plan.link, Placement.by_depth([2, 2, 2], [3, 2, 1], MICROBATCHES))
    with pytest.raises(ValueError, match="the plan has 3 stages, and the pipeline's group 2 ranks"):
        wide.stage(model, world)
    checked = pipeline.verify(plan, step, 2)
    dist.destroy_process_group()
    return {"plan": plan.fingerprint(), "steps": checked.steps, "depths": depths, "planned": plan.depths}


def test_a_plan_is_saved_loaded_run_and_verified(tmp_path: Path) -> None:
    first, second = run_ranks(body_plan, 2, str(tmp_path))
    assert first == second
    assert len(first["steps"]) == 2
    assert first["depths"] in (None, first["planned"])  # as torch itself counts


class SavedTensors:
    """Counts the tensors that autograd keeps from forward to backward passes."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        return SavedTensor(self, tensor)


class SavedTensor:
    def __init__(self, counter: SavedTensors, tensor: torch.Tensor) -> None:
        self.counter, self.tensor = counter, tensor

    def __del__(self) -> None:
        self.counter.now -= 1


def body_kept(rank: Rank) -> list[float]:
    """Of each placement how many micro-batches' tensors a rank keeps at most."""
    rank.init("gloo")
    pp = dist.group.WORLD
    assert pp is not None
    model, most = network(), []
    for depths in ([1, 1], [2, 1], [5, 2], [MICROBATCHES] * 2):
        placement = Placement.by_depth([3, 3], depths, MICROBATCHES)
        layers = {str(place): model[place] for place in range(3 * rank.rank, 3 * rank.rank + 3)}
        stage = torch_runtime.make_stage(placement, layers, rank.rank, pp, None)
        schedule = torch_runtime.make_schedule(placement, stage, loss_of)
        x, y = batch(0)
        for counter in (SavedTensors(), SavedTensors()):  # torch learns shapes in the first step
            with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda saved: saved.tensor):
                schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
        most.append(counter.most)
    dist.destroy_process_group()
    return [one / most[0] for one in most]


def test_stages_keep_as_many_micro_batches_as_planned() -> None:
    assert run_ranks(body_kept, 2) == [[1, 2, 5, MICROBATCHES], [1, 1, 2, MICROBATCHES]]


def body_lost(rank: Rank, backend: str) -> None:
    rank.init(backend)
    placement = Placement.by_depth([3, 3], [2, 1], MICROBATCHES)
    model = network()
    layers = {str(place): model[place] for place in range(3 * rank.rank, 3 * rank.rank + 3)}
    stage = torch_runtime.make_stage(placement, layers, rank.rank, dist.group.WORLD, None)
    schedule = torch_runtime.make_schedule(placement, stage, loss_of)
    x, y = batch(0)
    for step in itertools.count():
        schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
        if step == 0:
            rank.report("ready")


# With Gloo the message is torch's.
@pytest.mark.parametrize(
    ("backend", "message"), [pytest.param("gloo", "", marks=pytest.mark.slow), ("dear", "dear.*rank 1")]
)
def test_a_rank_that_dies_in_a_step(backend: str, message: str) -> None:
    with launch(body_lost, 2, backend) as ranks:
        ranks.expect("ready")
        ranks.kill(1)
        (outcome,) = ranks.outcomes(deadline=20)
        assert outcome.error in ("RuntimeError", "DistBackendError"), outcome.trace
        assert re.search(message, outcome.message, re.DOTALL), outcome.message


class Transposing(nn.Module):
    """Gives a view with gaps, and an expanded gradient comes back through it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().reshape(8, -1).t()


def summed(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return out.sum()


def gaps(rank: Rank, placement: Placement) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Transposing(), nn.Identity())
    first = placement.stages[rank.rank]
    layers = {str(place): model[place] for place in range(first.first, first.last + 1)}
    stage = torch_runtime.make_stage(placement, layers, rank.rank, dist.group.WORLD, None)
    schedule = torch_runtime.make_schedule(placement, stage, summed, scale_grads=False)
    x = torch.randn(BATCH, 8)
    schedule.step(*([x] if rank.rank == 0 else []), target=x if rank.rank == 1 else None)
    if rank.rank:
        return 0.0
    model(x.repeat(1, 1)).sum().backward()
    weight = model[0].weight
    assert weight.grad is not None
    return float((weight.grad - 2 * x.sum(0)).abs().max())  # twice: the pipeline's, and the one just now


def body_gaps(rank: Rank) -> list[float]:
    rank.init("gloo")
    # A whole backward pass makes the gradient of a stage's input dense; one of the input alone does not.
    placements = (Placement.by_depth([2, 1], [2, 1], MICROBATCHES), zero_bubble([2, 1], [2, 1]))
    found = [gaps(rank, placement) for placement in placements]
    dist.destroy_process_group()
    return found


def test_two_ranks_train_as_one_process() -> None:
    runtime = "_PipelineScheduleRuntime"
    found = values_in_turn({"trained": (body_two,), "tensors with gaps": (body_gaps,)}, 2)
    assert found["trained"] == [[runtime, runtime, "ScheduleGPipe", runtime, runtime, runtime]] * 2
    assert all(largest(errors) < 1e-5 for errors in found["tensors with gaps"]), found
