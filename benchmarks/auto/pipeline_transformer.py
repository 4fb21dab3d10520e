"""What does a plan bring to a real model, and do its stages keep the memory that was planned?

The character transformer of examples/train_pipeline.py, 12 blocks between an embedding and a head, on two ranks of this
machine with one thread each. Profile, plan and training are a user's. Two questions, and a file for each:

- ``pipeline_transformer``: a step of the plan over torch's Schedule1F1B with equal numbers of blocks.
- ``pipeline_frontier``: each point of the plan's frontier runs. What its stages keep for the backward pass is counted
  by hooks on saved tensors, each storage once and without parameters, and stands beside what was planned. Parameters
  and optimizer are not counted, so the comparison is the stricter one.

Checked first: losses and gradients are those of one process; and every way to cut the layers and to fill the stages was
tried by brute force, and none is faster than the frontier with as little memory.

    python benchmarks/auto/pipeline_transformer.py
    python benchmarks/auto/pipeline_transformer.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import torch.distributed as dist
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.planned_stage import PlannedStage
from train_pipeline import MICROBATCH, batch, loss_of, network, text

from torchext import auto
from torchext.auto import pipeline
from torchext.auto.pipeline import LayerProfile, PipelinePlan, Placement, search
from torchext.auto.pipeline.placement import even_sizes

BLOCKS, STAGES, MICROBATCHES = 12, 2, 8
REFERENCE = "Schedule1F1B even"
TOLERANCE = 1e-4  # of gradients, over the largest one
FRONTIER_TOLERANCE = 0.01  # as fast, to the planner
MEMORY_ERROR = 0.10
MIB = 1 << 20


class KeptBytes:
    """Counts what autograd keeps from forward to backward passes, each storage once, without parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Returns what to run a step under."""
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor)

    def take(self, tensor: torch.Tensor, holders: int) -> None:
        """One more, or one less, keeps the tensor."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return
        before = self._holders[storage.data_ptr()]
        self._holders[storage.data_ptr()] = before + holders
        if min(before, before + holders) == 0:
            self.now += holders * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Kept:
    """A saved tensor, as long as the graph has it."""

    def __init__(self, counter: KeptBytes, tensor: torch.Tensor) -> None:
        self._counter, self.tensor = counter, tensor
        counter.take(tensor, 1)

    def __del__(self) -> None:
        self._counter.take(self.tensor, -1)


class Contender(PlannedStage):
    """This rank's stage of a plan of the transformer."""

    def __init__(self, plan: PipelinePlan, source: torch.Tensor, *, of_torch: bool = False) -> None:
        self._x, self._y = batch(source, 0, 0, MICROBATCHES * MICROBATCH)
        super().__init__(plan, network(BLOCKS), loss_of, self._x, self._y, of_torch=of_torch)

    def error(self) -> float:
        """Returns how far gradients are from one process's, over the largest, the worst of all ranks."""
        self.clear()
        self.step()
        whole = network(BLOCKS)
        loss_of(whole(self._x), self._y).backward()
        gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
        worst = torch.zeros(())
        for name, parameter in self.layers.named_parameters():
            expected = gradients[name]
            assert expected is not None
            found = parameter.grad if parameter.grad is not None else torch.full_like(expected, torch.inf)
            worst = torch.maximum(worst, (found - expected).abs().max() / expected.abs().max())
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def kept_bytes(self) -> list[int]:
        """Returns the most bytes that each stage keeps in a step."""
        counter = KeptBytes(self.layers)
        with counter.hooks():
            self.step()
        found = [0] * STAGES
        dist.all_gather_object(found, counter.peak)
        return found


def planned_kept(plan: PipelinePlan) -> list[float]:
    """Returns what is planned for the activations of each stage, without its parameters."""
    layers = [plan.profile.layers[stage.first : stage.last + 1] for stage in plan.placement.stages]
    static = [plan.state_factor * sum(layer.parameter_bytes for layer in own) for own in layers]
    return [peak - own for peak, own in zip(plan.peak_bytes, static, strict=True)]


def by_depth(profile: LayerProfile, link: auto.LinkModel, sizes: Sequence[int], depths: Sequence[int]) -> PipelinePlan:
    """Returns a plan without a split backward pass."""
    return PipelinePlan.of(profile, link, Placement.by_depth(sizes, depths, MICROBATCHES))


def frontier_error(plan: PipelinePlan) -> float:
    """Returns by how much brute force is faster than a point of the frontier with as little memory, at most."""
    layers = len(plan.profile.layers)
    every = []
    for cut in range(1, layers):
        for first in range(1, MICROBATCHES + 1):
            for last in range(1, first + 1):
                placement = Placement.by_depth([cut, layers - cut], [first, last], MICROBATCHES)
                found = search.predict(plan.profile, plan.link, placement, mode="ideal")
                every.append((max(found.peak_bytes), found.seconds))
    worst = 0.0
    for point in plan.frontier():
        fastest = min((seconds for peak, seconds in every if peak <= point.memory), default=0.0)
        worst = max(worst, point.seconds / fastest - 1 if fastest > 0 else float("inf"))
    return worst


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function. ``rank.settings``: ``repeats``, ``steps``, ``points``, ``calibration_s``."""
    settings, checks = rank.settings, Checks()
    torch.set_num_threads(1)
    source = text()
    with rank.process_group("gloo"):
        link = auto.calibrate(max_seconds=settings["calibration_s"])
        box: list[Any] = [None]
        if rank.rank == 0:
            profile = pipeline.profile(network(BLOCKS), batch(source, 0, 0, MICROBATCH)[0])
            options: dict[str, Any] = {"world_size": STAGES, "microbatches": MICROBATCHES, "stages": STAGES}
            whole = pipeline.plan(profile, link, **options)
            split = pipeline.plan(profile, link, **options, schedules=("1f1b", "zero-bubble"))
            box[0] = profile, whole, split
        dist.broadcast_object_list(box)
        profile, whole, split = box[0]
        even = by_depth(profile, link, even_sizes(BLOCKS + 2, STAGES), [2, 1])
        checks.confirm("planned", frontier_error(whole), FRONTIER_TOLERANCE)
        plans = {REFERENCE: even, "plan": whole, "plan zero-bubble": split}
        contenders = {name: Contender(plan, source, of_torch=name == REFERENCE) for name, plan in plans.items()}
        for name, contender in contenders.items():
            checks.confirm(name, contender.error(), TOLERANCE)
        runs = in_turn(
            {name: lambda c=contender: c.measure(settings["steps"]) for name, contender in contenders.items()},
            settings["repeats"],
        )
        kept = {}
        points = whole.frontier()
        for point in itertools.islice(points, 0, None, max(1, len(points) // settings["points"])):
            own = by_depth(profile, link, point.sizes, point.depths)
            contender = Contender(own, source)
            checks.confirm("measured", contender.error(), TOLERANCE)
            name = f"{'+'.join(map(str, point.sizes))} layers, {' and '.join(map(str, point.depths))} in flight"
            planned, measured = planned_kept(own), contender.kept_bytes()
            fullest = planned.index(max(planned))
            kept[name] = {
                "planned": planned[fullest] / MIB,
                "measured": measured[fullest] / MIB,
                "stages": {"planned": planned, "measured": measured},
                "predicted_ms": 1e3 * own.seconds,
                "measured_ms": contender.measure(settings["steps"]),
            }
    return {
        "runs": runs,
        "checks": checks.done,
        "kept": kept,
        "plans": {
            name: {"sizes": plan.sizes, "depths": plan.depths, "predicted_ms": 1e3 * plan.predict().seconds}
            for name, plan in plans.items()
        },
    }


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=f"{REFERENCE},plan,plan zero-bubble", repeats=5)
    parser.add_argument("--steps", type=int, default=8, help="timed in a repeat")
    parser.add_argument("--points", type=int, default=6, help="of the frontier, about")
    parser.add_argument("--calibration", type=float, default=3.0, help="seconds, at most")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.steps, parsed.points, parsed.calibration = 1, 1, 2, 1.0
    return parsed


def main() -> None:
    """Measures, and writes ``pipeline_transformer.json`` and ``pipeline_frontier.json`` with their pictures."""
    args = arguments()
    settings = {
        "repeats": args.repeats,
        "steps": args.steps,
        "points": args.points,
        "calibration_s": args.calibration,
    }
    found = launch("pipeline_transformer:ranks", ranks=STAGES, settings=settings, deadline_s=400)[0]
    common: dict[str, Any] = {
        "script": cli.script_line(),
        "higher_is_better": False,
        "conditions": {"blocks": BLOCKS, "stages": STAGES, "microbatches": MICROBATCHES, **settings},
    }
    steps = Report("pipeline_transformer", unit="ms a step", reference=REFERENCE, **common)
    steps.add(
        f"{BLOCKS} blocks on {STAGES} ranks",
        found["runs"],
        checks=found["checks"],
        target=1.0,
        notes={"plans": found["plans"]},
    )
    steps.write(args.results)
    memory = Report("pipeline_frontier", unit="MiB", reference="planned", **common)
    for name, one in found["kept"].items():
        off = one["measured"] / one["planned"] - 1
        print(f"{name}: {100 * off:+.1f} % of the planned memory, asked {100 * MEMORY_ERROR:.0f} at most", flush=True)
        figures = {side: [one[side]] for side in ("planned", "measured")}
        memory.add(name, figures, checks=found["checks"], notes={**one, "met": abs(off) <= MEMORY_ERROR})
    memory.write(args.results)


if __name__ == "__main__":
    main()
