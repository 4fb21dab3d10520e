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
    return parser


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


def main(words: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = _parser().parse_args(words)
    try:
        {"bench": _bench, "explain": _explain, "simulate": _simulate}[arguments.command](arguments)
    except (ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"torchext.auto {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
