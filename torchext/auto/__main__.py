"""``python -m torchext.auto``: measures links, explains plans, and predicts steps on other networks."""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist

from torchext.auto.candidates import INEXACT, simulate
from torchext.auto.explanation import table
from torchext.auto.link_model import LinkModel, calibrate
from torchext.auto.pipeline import LayerProfile, PipelinePlan
from torchext.auto.pipeline import plan as plan_pipeline
from torchext.auto.pipeline.placement import ORDERS
from torchext.auto.plots import draw_link
from torchext.auto.step_profile import Profile
from torchext.auto.sync_plan import SyncPlan

_BENCH = "measures the links between the ranks: torchrun --nproc-per-node 4 -m torchext.auto bench"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchext.auto", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help=_BENCH, description=_BENCH)
    bench.add_argument("--backend", default="gloo", help="of the process group; default: %(default)s")
    bench.add_argument("--device", help="cpu or cuda; default: what the backend carries, cpu first")
    bench.add_argument("--max-seconds", type=float, default=5.0, help="default: %(default)s")
    bench.add_argument("--json", metavar="FILE", help="writes the tables there, for LinkModel.load and simulate")
    bench.add_argument("--plot", metavar="FILE", help="draws the tables there; needs matplotlib")
    explain = commands.add_parser("explain", help="says what a saved plan has chosen, and why")
    explain.add_argument("plan", help="written by SyncPlan.save")
    explain.add_argument("--timeline", metavar="FILE", help="draws the chosen way over plain DDP; needs matplotlib")
    other = commands.add_parser("simulate", help="predicts steps of a profiled model on another network")
    other.add_argument("--profile", required=True, metavar="FILE", help="written by Profile.save")
    other.add_argument("--link", required=True, metavar="FILE", help="written by LinkModel.save or bench --json")
    other.add_argument("--world", type=int, metavar="RANKS", help="default: as many as were measured")
    other.add_argument("--rate", type=float, metavar="BYTES", help="of a link, a second; default: as measured")
    other.add_argument("--latency", type=float, metavar="SECONDS", help="of a hop; default: as measured")
    other.add_argument("--allow", nargs="*", default=[], metavar="WAY", help=f"inexact: {', '.join(INEXACT)}")
    _add_pipeline(commands)
    return parser


def _add_pipeline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser("pipeline", help="cuts a profiled chain of layers into pipeline stages")
    made.add_argument("--profile", required=True, metavar="FILE", help="written by LayerProfile.save")
    made.add_argument("--link", required=True, metavar="FILE", help="written by LinkModel.save or bench --json")
    made.add_argument("--world", required=True, type=int, metavar="RANKS")
    made.add_argument("--microbatches", required=True, type=int, metavar="NUMBER", help="over all ranks")
    made.add_argument("--memory", metavar="BYTES", help="of a rank, as 12GiB; default: no limit")
    made.add_argument("--schedules", nargs="+", default=["1f1b"], metavar="ORDER", help=", ".join(ORDERS))
    made.add_argument("--stages", type=int, metavar="NUMBER", help="default: the best one")
    made.add_argument("--state-factor", type=float, default=4.0, help="bytes by byte of a parameter; default: 4")
    made.add_argument("--recompute", action="store_true", help="stages may drop activations and compute them again")
    made.add_argument("--save", metavar="FILE", help="writes the plan there, for PipelinePlan.load")
    made.add_argument("--csv", metavar="FILE", help="writes the table of actions there, as torch reads it")
    made.add_argument("--png", metavar="FILE", help="draws a step there, over one of 1F1B; needs matplotlib")


def _bench(arguments: argparse.Namespace) -> None:
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(arguments.backend)
    try:
        link = calibrate(max_seconds=arguments.max_seconds, device=arguments.device)
        if dist.get_rank() == 0:
            print(link.report())
            if arguments.json:
                link.save(arguments.json)
            if arguments.plot:
                draw_link(arguments.plot, link)
    finally:
        dist.destroy_process_group()


def _explain(arguments: argparse.Namespace) -> None:
    plan = SyncPlan.load(arguments.plan)
    print(plan.explain())
    if arguments.timeline:
        plan.timeline(arguments.timeline)


def _simulate(arguments: argparse.Namespace) -> None:
    profile, link = Profile.load(arguments.profile), LinkModel.load(arguments.link)
    if arguments.rate is not None or arguments.latency is not None:
        link = link.scaled(rate=arguments.rate, latency=arguments.latency)
    print(table(profile, simulate(profile, link, world_size=arguments.world, allow=arguments.allow)))


def _pipeline(arguments: argparse.Namespace) -> None:
    plan: PipelinePlan = plan_pipeline(
        LayerProfile.load(arguments.profile),
        LinkModel.load(arguments.link),
        world_size=arguments.world,
        microbatches=arguments.microbatches,
        memory=int(arguments.memory) if (arguments.memory or "").isdecimal() else arguments.memory,
        schedules=arguments.schedules,
        stages=arguments.stages,
        state_factor=arguments.state_factor,
        recompute=arguments.recompute,
    )
    print(plan.explain())
    for point in plan.frontier():
        print(point)
    if arguments.save:
        plan.save(arguments.save)
    if arguments.csv:
        plan.write_csv(arguments.csv)
    if arguments.png:
        plan.timeline(arguments.png)


def main(words: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = _parser().parse_args(words)
    try:
        commands = {"bench": _bench, "explain": _explain, "simulate": _simulate, "pipeline": _pipeline}
        commands[arguments.command](arguments)
    except (ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"torchext.auto {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
