"""How much memory does ``torchext.attach`` take? At most one more copy of the parameters.

Two ranks, a model of 128 MiB of parameters that computes nothing. Each contender trains in processes of its own, since
freed memory does not always go back to the system. The figure is a rank's own memory (USS: pages that nobody shares)
after ten steps less that before the model was made, in copies of the parameters; DDP alone needs parameters, gradients
and buckets.
The notes have what ``attach`` allocated in tensors, counted by torch's profiler, and the peak.

    python benchmarks/prague/prague_memory.py --contenders ddp,prague:smart/atc,prague:smart/cta
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.report.results import Checks, Report
from lab.run import cli
from lab.run.launch import launch
from lab.run.memory import own_bytes, peak_bytes, reset_peak
from lab.run.rank import Rank
from lab.workloads.contenders import contender
from lab.workloads.stragglers import parse
from lab.workloads.training import Run

WORLD = 2
STEPS = 10
ALLOWED_COPIES = 1.0
RESOLUTION = 0.05  # in copies: code that attach loads, pages that the allocator keeps
TOLERANCE = 1e-4


class _CountedRun(Run):
    """A run whose ``attach`` is counted."""

    tensor_bytes = 0
    own_at_attach = 0

    def attach(self) -> None:
        before = own_bytes()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            super().attach()
        self.own_at_attach = own_bytes() - before
        self.tensor_bytes = sum(event.self_cpu_memory_usage for event in profiler.key_averages())


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: one contender, from the empty process to the steps."""
    which = contender(rank.settings["contender"])
    workload = {"layers": 16, "parameter_bytes": rank.settings["bytes"], "forward_ms": 0.0, "backward_ms": 0.0}
    checks = Checks()
    with rank.process_group(which.backend, which.pg_options()):
        rank.board.barrier()
        before = own_bytes()
        reset_peak()
        run = _CountedRun(rank, which, workload, parse("none", rank.world_size))
        for _ in range(STEPS):
            run.step()
        run.training.settle()
        after, peak = own_bytes(), peak_bytes()
        dist.all_reduce(torch.zeros(1))  # in the middle of training: averages that others wait for are deferred
        with_collective = own_bytes()
        checks.confirm(which.name, run.check(), TOLERANCE)
        run.training.detach()
    return {
        "checks": checks.done,
        "name": which.name,
        "own": after - before,
        "peak": peak - before,
        "with_collective": with_collective - before,
        "attach_own": run.own_at_attach,
        "attach_tensors": run.tensor_bytes,
    }


def main() -> None:
    """Runs and writes ``prague_memory.json`` and ``.png``."""
    parser = cli.parser(__doc__ or "", contenders="ddp,prague:smart/atc,prague:smart/cta", repeats=3)
    parser.add_argument("--mib", type=int, default=128, help="of parameters")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.mib = 1, 32
    size = args.mib << 20
    report = Report(
        "prague_memory",
        script=cli.script_line(),
        unit="copies of the parameters",
        reference="ddp",
        higher_is_better=False,
        conditions={"parameter_bytes": size, "ranks": WORLD, "steps": STEPS, "allowed_extra_copies": ALLOWED_COPIES},
    )
    figures: dict[str, list[float]] = {}
    notes: dict[str, list[dict[str, float]]] = {}
    checks: dict[str, dict[str, float]] = {}
    for _ in range(args.repeats):
        for text in cli.names(args.contenders):
            settings = {"contender": text, "bytes": size}
            results = launch("prague_memory:ranks", ranks=WORLD, settings=settings, deadline_s=180)
            name = results[0]["name"]
            checks.update(results[0]["checks"])
            figures.setdefault(name, []).append(max(result["own"] for result in results) / size)
            shares = {
                key: max(r[key] for r in results) / size
                for key in ("peak", "with_collective", "attach_own", "attach_tensors")
            }
            notes.setdefault(name, []).append(shares)
    extra = {
        name: [mine - plain for mine, plain in zip(values, figures["ddp"], strict=True)]
        for name, values in figures.items()
        if name != "ddp" and "ddp" in figures
    }
    report.add(f"{args.mib} MiB", figures, checks=checks, notes={"in_copies": notes, "extra_copies": extra})
    for name, values in extra.items():
        counted = max(share["attach_tensors"] for share in notes[name])
        grown = max(share["attach_own"] for share in notes[name])
        collective = max(share["with_collective"] for share in notes[name]) - min(figures["ddp"])
        comparison = "within" if max(counted, grown) <= ALLOWED_COPIES + RESOLUTION else "MORE THAN"
        print(
            f"{name}, in copies of the parameters: attach made {counted:.2f} in tensors, resident {grown:+.2f}, "
            f"{comparison} the {ALLOWED_COPIES:g} allowed; {max(values):+.2f} compared with ddp after {STEPS} steps, "
            f"{collective:+.2f} after a collective of the user's in the middle of training"
        )
    report.write(args.results)


if __name__ == "__main__":
    main()
