"""What do rows save where a large layer has few of them? Plain DDP against `FactorLayers`, four hosts on slow links.

Rows travel beside DDP's all-reduce, or beside `dear`. Which of the two shows where other layers are deep, too: in the
case `deep` 54 layers of 40 MB (8 MB at 200 Mb/s) that sleep 100 ms forward and 200 ms backward stand before the wide
one, of 2048 x 2048. There `dear` and `dear+factors` train, too, in the replicated form with buckets of 4 MiB.

The gradient of a layer of 4096 x 4096 is 67 MB, its rows of a batch of 16 are 0.5 MB. That of a table of 50257 x 256
(GPT-2's words) is 51 MB, its rows of 64 words are 66 KB. Both contenders train the same model by SGD: one such layer,
and a head of ten outputs that is all-reduced with both. A step is forward pass, loss, backward pass and optimizer.
Nothing is emulated but the links: four ranks share the processor of one machine, and the products of rows with it.

Checked first: the parameters are those of one process that trains on the batches of all ranks, and the same on all
ranks, bit for bit.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/auto/auto_factors.py                     # all layers at 1 Gb/s and 200 Mb/s: 8 minutes
    python benchmarks/auto/auto_factors.py --layers deep --update
    python benchmarks/auto/auto_factors.py --rows 256          # where rows do not pay
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
import torch.distributed as dist
from lab.net.netlab import NetLab
from lab.report.results import Checks, Report, in_turn
from lab.run import cli
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.emulated import EmulatedModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONTENDERS = "ddp,factors,dear,dear+factors"
HOSTS = 4
RATES = "1gbit,200mbit"
DEEP = "deep"
LAYERS = f"2048,4096,table,{DEEP}"
WORDS, WORD_WIDTH, WORDS_A_ROW = 50257, 256, 4  # of the table
TARGETS = {"1gbit": 3.0, "200mbit": 10.0}
DEEP_WIDTH = 2048
DEEP_BODY: dict[str, Any] = {"layers": 54, "growth": 15.0, "forward_ms": 100.0, "backward_ms": 200.0}
DEEP_MEGABYTES = {"200mbit": 8}  # so that a step takes a second at most of rates
BUCKET_MB = 4.0
OUTPUTS = 10
LEARNING_RATE = 0.1
WARMUP_STEPS = 4  # dear cuts its buckets after three
TOLERANCE = 1e-4


def rows_of(layer: str, rows: int) -> int:
    """Returns how many rows of the layer a rank has in a step, of a batch of so many."""
    return rows * WORDS_A_ROW if layer == "table" else rows


def width_of(layer: str) -> int:
    """Returns the width of the case's linear layer."""
    return DEEP_WIDTH if layer == DEEP else int(layer)


def wide_layer(layer: str) -> str:
    """Returns the name of the module whose rows travel."""
    return "1" if layer == DEEP else "0"


def make_model(layer: str, megabytes: int) -> nn.Sequential:
    """Returns the model, the same in every process.

    Args:
        layer: The case.
        megabytes: Of the deep layers, where it has some.
    """
    torch.manual_seed(0)
    if layer == "table":
        words = nn.Embedding(WORDS, WORD_WIDTH)
        nn.init.normal_(words.weight, std=0.02)  # as language models do; next to 1 a step would be lost in rounding
        return nn.Sequential(words, nn.Flatten(), nn.Linear(WORDS_A_ROW * WORD_WIDTH, OUTPUTS))
    width = width_of(layer)
    wide = (nn.Linear(width, width), nn.Tanh(), nn.Linear(width, OUTPUTS))
    if layer == DEEP:
        return nn.Sequential(EmulatedModel(parameter_bytes=megabytes * 10**6, **DEEP_BODY), *wide)
    return nn.Sequential(*wide)


def batches(rank: int, layer: str, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the batches of a rank."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        if layer == "table":
            inputs = torch.randint(WORDS, (rows, WORDS_A_ROW), generator=generator)
            inputs[:, 0] = inputs[0, 0]  # a word that all have
        else:
            inputs = torch.randn(rows, width_of(layer), generator=generator)
        yield inputs, torch.randint(OUTPUTS, (rows,), generator=generator)


class Training:
    """One contender's model."""

    def __init__(self, name: str, rank: Rank, layer: str, rows: int, megabytes: int) -> None:
        import torchext
        from torchext import auto

        self.make = functools.partial(make_model, layer, megabytes)
        self.module = self.make()
        places = rows_of(layer, rows)
        self.layers = auto.FactorLayers(self.module, [wide_layer(layer)], places) if "factors" in name else None
        if self.layers is not None:
            self.layers.install()
        self.ddp = DistributedDataParallel(self.module)
        if self.layers is not None:
            self.layers.follow(self.ddp)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.sync = torchext.attach(self.ddp, self.optimizer) if "dear" in name else None
        self.batches = batches(rank.rank, layer, rows)

    def run(self, steps: int) -> list[float]:
        """Trains; returns the milliseconds of each step."""
        ends = []
        data = list(itertools.islice(self.batches, steps))
        ends.append(time.perf_counter())
        for inputs, labels in data:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(inputs), labels).backward()
            self.optimizer.step()
            ends.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in itertools.pairwise(ends)]

    def error(self, ranks: int, layer: str, rows: int) -> float:
        """Returns how far the parameters are after the warm-up from those of one process, relative to their way."""
        if self.sync is not None:
            self.sync.wait()
        alone = self.make()
        start = [parameter.detach().clone() for parameter in alone.parameters()]
        optimizer = torch.optim.SGD(alone.parameters(), lr=LEARNING_RATE)
        every = [batches(rank, layer, rows) for rank in range(ranks)]
        for _ in range(WARMUP_STEPS):
            parts = [next(own) for own in every]
            inputs, labels = (torch.cat(part) for part in zip(*parts, strict=True))
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(inputs), labels).backward()
            optimizer.step()
        worst = 0.0
        for own, expected, begin in zip(self.module.parameters(), alone.parameters(), start, strict=True):
            worst = max(worst, float(((own - expected).abs().max() / (expected - begin).abs().max()).detach()))
            first = own.detach().clone()
            dist.broadcast(first, 0)
            worst = worst if torch.equal(first, own) else float("inf")
        found = torch.tensor([worst], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: every contender in turn, each repeat in a session of its own."""
    settings, checks = rank.settings, Checks()
    layer, rows = settings["layer"], settings["rows"]

    def measure(name: str) -> dict[str, Any]:
        import torchext

        fixed = torchext.DeAROptions(bucket_mb=BUCKET_MB, allreduce_fallback=False)
        with rank.process_group(*(("gloo",) if name == "ddp" else ("dear", fixed))):
            training = Training(name, rank, layer, rows, settings["megabytes"])
            training.run(WARMUP_STEPS)
            if name not in checks.done:
                checks.confirm(name, training.error(rank.world_size, layer, rows), TOLERANCE)
            checks.require(name)
            rank.board.start_together()
            steps = training.run(settings["steps"] + 1)[1:]  # the first waits for nothing of a step before
            stats = training.layers.stats() if training.layers is not None else None
            if training.sync is not None:
                training.sync.detach()
            del training  # before its group, as DDP's reducer holds it
        return {"steps_ms": steps, "stats": stats}

    return {
        "runs": in_turn(
            {name: functools.partial(measure, name) for name in settings["contenders"]}, settings["repeats"]
        ),
        "checks": checks.done,
    }


def described(layer: str) -> str:
    """Returns what a case is called by."""
    if layer == "table":
        return f"table of {WORDS} x {WORD_WIDTH}"
    return f"{width_of(layer)} x {width_of(layer)}" + (" behind 54 layers" if layer == DEEP else "")


def figures_of(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns of each contender the mean step of a repeat in milliseconds, on the slowest rank."""
    return {
        name: [
            max(sum(steps) / len(steps) for steps in (result["runs"][name][at]["steps_ms"] for result in results))
            for at in range(len(first))
        ]
        for name, first in results[0]["runs"].items()
    }


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=3)
    parser.add_argument(
        "--layers", default=LAYERS, help="a width of a linear layer, inputs and outputs; table; or deep"
    )
    parser.add_argument("--rates", default=RATES, help=f"of each host's link; goals are set for {', '.join(TARGETS)}")
    parser.add_argument("--rows", type=int, default=16, help="of a rank's batch")
    parser.add_argument("--steps", type=int, default=4, help="that are counted, each repeat")
    parser.add_argument("--update", action="store_true", help="keep the other cases of the results that are there")
    parsed = parser.parse_args()
    if parsed.quick:
        parsed.repeats, parsed.steps, parsed.layers = 1, 2, f"512,table,{DEEP}"
    return parsed


def main() -> None:
    """Measures case by case, and writes ``auto_factors.json`` and ``.png``."""
    args = arguments()
    report = Report(
        "auto_factors",
        script=cli.script_line(),
        unit="ms",
        reference="ddp",
        higher_is_better=False,
        conditions={"hosts": HOSTS, "steps": args.steps, "warmup_steps": WARMUP_STEPS},
    )
    for rate in cli.names(args.rates):
        with NetLab(HOSTS, rate=rate) as lab:
            network = lab.describe()
            for layer in cli.names(args.layers):
                chosen = [name for name in cli.names(args.contenders) if layer == DEEP or "dear" not in name]
                settings = {
                    "contenders": chosen,
                    "megabytes": DEEP_MEGABYTES.get(rate, 40),
                    "repeats": args.repeats,
                    "steps": args.steps,
                    "layer": layer,
                    "rows": args.rows,
                }
                results = launch("auto_factors:ranks", ranks=HOSTS, settings=settings, deadline_s=600, lab=lab)
                stats = {name: runs[-1]["stats"] for name, runs in results[0]["runs"].items() if runs[-1]["stats"]}
                report.add(
                    f"{described(layer)}, {rows_of(layer, args.rows)} rows a rank, {rate}",
                    figures_of(results),
                    checks=results[0]["checks"],
                    target=TARGETS.get(rate) if args.rows == 16 and layer != DEEP else None,
                    notes={"network": network, "stats_of_rank_0": stats},
                )
    if args.update:
        report.keep(args.results / f"{report.name}.json")
    report.write(args.results)


if __name__ == "__main__":
    main()
