"""How long does the search for the best pipeline take, by stages, micro-batches, layers and family of orders?

Models of random layers, a transfer that takes a third of a layer's forward, no limit of memory and a limit that leaves
little more than 1F1B's depths, a frontier of four points, and a network on which transfers of a rank share its port.
Nothing is measured but the search itself, in one thread: it takes no network and no tensor.

Checked first: the planned step is the simulator's, each stage keeps the memory, and no even split in the order of
torch's Schedule1F1B that fits is faster.

    python benchmarks/auto/pipeline_search.py
    python benchmarks/auto/pipeline_search.py --quick
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.report.results import Checks, Report, in_turn
from lab.run import cli

from torchext import _C

CASES = ((4, 16, 48), (8, 64, 96), (64, 256, 128))  # stages, micro-batches, layers
TARGET_SECONDS = {8: 2.0, 64: 10.0}  # by stages
KEPT_NBYTES = 1_000_000
TRANSFER_SECONDS = 0.3
FRONTIER_POINTS = 4
VARIANTS = ("1f1b", "1f1b tight", "zero-bubble", "frontier", "shared ports")
OUTPUT_NBYTES = 1_000_000


def make_layers(count: int) -> list[_C.PipelineLayer]:
    """Returns layers whose forward takes about a second, and backward twice that."""
    draw = random.Random(count)
    layers = []
    for _ in range(count):
        seconds = draw.uniform(0.7, 1.7)
        layers.append(
            _C.PipelineLayer(
                forward_seconds=seconds,
                backward_input_seconds=seconds,
                backward_weight_seconds=seconds,
                kept_nbytes=round(seconds * KEPT_NBYTES),
                output_nbytes=OUTPUT_NBYTES,
            )
        )
    return layers


def make_options(stages: int, microbatches: int, count: int, variant: str) -> _C.PipelineOptions:
    """Returns what the variant allows; a stage of 1F1B keeps its share of the layers for each stage behind it."""
    tight = 1.3 * count * KEPT_NBYTES if variant == "1f1b tight" else None
    return _C.PipelineOptions(
        world_size=stages,
        stages=stages,
        microbatches=microbatches,
        memory_nbytes=tight,
        schedules=["zero-bubble" if variant == "zero-bubble" else "1f1b"],
        frontier_points=FRONTIER_POINTS if variant == "frontier" else 0,
    )


def make_link(variant: str) -> _C.PipelineLink:
    """Returns transfers of one length."""
    return _C.PipelineLink.straight(
        latency_seconds=0.0, bytes_per_second=OUTPUT_NBYTES / TRANSFER_SECONDS, shared_ports=variant == "shared ports"
    )


def search_seconds(layers: list[_C.PipelineLayer], link: _C.PipelineLink, options: _C.PipelineOptions) -> float:
    """Returns the time of one search."""
    begun = time.perf_counter()
    _C.plan_pipeline(layers, link, options)
    return time.perf_counter() - begun


def error_of(layers: list[_C.PipelineLayer], link: _C.PipelineLink, options: _C.PipelineOptions) -> float:
    """Returns how far the plan is off the simulator; infinity where an even split is faster."""
    plan = _C.plan_pipeline(layers, link, options)
    sizes = [stage.last - stage.first + 1 for stage in plan.stages]
    stages = _C.pipeline_stage_times(layers, link, options, sizes)
    run = _C.simulate_pipeline(stages, plan.table, "torch" if link.shared_ports else "ideal")
    if run.most_in_flight != [stage.depth for stage in plan.stages] or sum(sizes) != len(layers):
        return float("inf")
    if plan.seconds > 1.01 * min(alternative.seconds for alternative in plan.alternatives):
        return float("inf")
    return abs(run.seconds / plan.seconds - 1)


def main() -> None:
    """Checks and times every case."""
    arguments = cli.parser(__doc__ or "", contenders=",".join(VARIANTS), repeats=5).parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    cases = CASES[:2] if arguments.quick else CASES
    report = Report(
        "pipeline_search",
        script=cli.script_line(),
        unit="s",
        reference="1f1b",
        higher_is_better=False,
        conditions={"transfer_s": TRANSFER_SECONDS, "target_s": {str(p): s for p, s in TARGET_SECONDS.items()}},
    )
    for stages, microbatches, count in cases:
        layers = make_layers(count)
        options = {
            variant: make_options(stages, microbatches, count, variant) for variant in cli.names(arguments.contenders)
        }
        checks = Checks()
        for variant, allowed in options.items():
            checks.confirm(variant, error_of(layers, make_link(variant), allowed), 1e-12)
        figures = in_turn(
            {v: lambda v=v, o=o, ls=layers: search_seconds(ls, make_link(v), o) for v, o in options.items()}, repeats
        )
        report.add(f"{stages} stages, {microbatches} micro-batches, {count} layers", figures, checks=checks.done)
    report.write(arguments.results, log_scale=True)


if __name__ == "__main__":
    main()
