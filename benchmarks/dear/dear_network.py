"""What does overlapping both halves of the all-reduce save? DDP, ZeRO, FSDP2 and dear, four hosts at 1 Gb/s.

Four hosts are network namespaces behind a switch, each link limited both ways (netlab.py); one worker a host with
40 MB of parameters in layers that grow with depth, as a ResNet's do, and emulated compute (100 ms forward, 200 ms
backward). A reduce-scatter and an all-gather of a ring of four take 240 ms each at 1 Gb/s: DDP has both of them under
backward, at best 580 ms a step; dear the one under backward and the other under the next forward, at best 480 ms.

How the parameters lie in the layers decides what DDP's buckets of 25 MB can hide, and how long nothing can travel at
the start of backward, so there are several models, and the same is asked of all. ``deep`` has as many layers as a
ResNet-50, growing linearly; ``coarse`` has 20 of them; ``resnet50``, ``resnet101`` and ``resnet152`` have those
networks' own proportions: three fifths of a ResNet-50 are in its last stage, which is kind to DDP, two fifths of a
ResNet-101 and a quarter of a ResNet-152. All contenders train ``deep``, OTHER_CONTENDERS the others.

``ddp:best`` is the best of several bucket sizes and ``fsdp2:best`` the better of one unit a layer and groups of 4 MiB,
by a short probe in the same network. Bounds (lab/report/bounds.py) come from the rate measured between the hosts.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/dear/dear_network.py
    python benchmarks/dear/dear_network.py --contenders ddp,ddp:best,fsdp2:best,zero  # without torchext
    python benchmarks/dear/dear_network.py --models resnet152 --update  # one case anew, into the results that are there
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.report import bounds, tuning
from lab.report.results import Report, Spread, paired_ratio
from lab.run import cli
from lab.run.launch import launch
from lab.workloads import emulated
from lab.workloads.contenders import contender
from lab.workloads.training import gradients_per_second, summarize

CONTENDERS = "ddp,ddp:best,fsdp2:best,zero,dear:sharded/2,dear:sharded/4,dear:sharded/auto,dear:replicated/auto"
OTHER_CONTENDERS = ("ddp", "ddp:best", "dear:sharded/auto")
_COMPUTE = {"parameter_bytes": 40_000_000, "forward_ms": 100.0, "backward_ms": 200.0}
# Where it grows, the last layer has 16 times the parameters of the first.
MODELS: dict[str, dict[str, Any]] = {
    "deep": {"layers": 54, "growth": 15.0, **_COMPUTE},
    "coarse": {"layers": 20, "growth": 15.0, **_COMPUTE},
    **{
        f"resnet{layers}": {"layers": layers + 4, "sizes": emulated.resnet_sizes(layers), **_COMPUTE}
        for layers in (50, 101, 152)
    },
}
TARGET_DEFAULT = 1.40
TARGET_BEST = 1.22
TARGET_BOUND = 0.95
BOUND_ERROR = 0.02  # of the measured rate, and of the emulated compute


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=5)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--window", type=float, default=15.0, help="seconds that are counted, each repeat")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before them")
    parser.add_argument("--tuning", type=float, default=120.0, help="seconds before those, at most, while dear decides")
    parser.add_argument("--probe", type=float, default=8.0, help="seconds that a variant is probed for the best one")
    parser.add_argument("--update", action="store_true", help="keep the other cases of the results that are there")
    parsed = parser.parse_args()
    unknown = set(cli.names(parsed.models)) - set(MODELS)
    if unknown:
        parser.error(f"--models: {', '.join(sorted(unknown))}: not among {', '.join(MODELS)}")
    if parsed.quick:
        parsed.repeats, parsed.window, parsed.warmup, parsed.tuning, parsed.probe = 1, 5.0, 1.0, 20.0, 3.0
    return parsed


def against_bounds(
    model: Mapping[str, Any], figures: Mapping[str, list[float]], rates: list[float], hosts: int
) -> dict[str, Any]:
    """Returns the bounds, and what share of its bound each contender reached.

    All links have one limit, and a busy machine measures too little, never too much: the highest rate counts.
    """
    forward, backward, total = model["forward_ms"], model["backward_ms"], model["parameter_bytes"]
    half = bounds.reduce_scatter_ms(hosts, total, max(rates))
    dear = bounds.dear_step_ms(forward, backward, half)
    ddp = bounds.ddp_step_ms(forward, backward, half)
    sizes = emulated.layer_sizes(model["layers"], total // 4, model.get("growth", 0.0), model.get("sizes"))
    halves = [half * size / sum(sizes) for size in sizes]
    shares = {
        # FSDP2 and ZeRO move in the same halves, but not at dear's times: they are shown against the same bound.
        name: Spread(tuple((ddp if name.startswith("ddp") else dear) * rate / 1e3 for rate in values)).as_json()
        for name, values in figures.items()
    }
    return {
        "half_ms": half,
        "dear_step_ms": dear,
        "ddp_step_ms": ddp,
        "dear_pipeline_ms": bounds.dear_pipeline_ms(forward, backward, halves),
        "ddp_pipeline_ms": bounds.ddp_pipeline_ms(forward, backward, halves),
        "share_of_bound": shares,
    }


def comparisons(
    figures: Mapping[str, list[float]], best_ddp: str | None, bound: dict[str, Any] | None
) -> dict[str, Any]:
    """Prints and returns what is asked of each dear contender: ratios over both ddp, share of the bound."""
    found: dict[str, Any] = {}
    if bound is not None:
        print(
            "ideal pipelines of whole layers: {dear_pipeline_ms:.1f} ms a step, ddp {ddp_pipeline_ms:.1f}".format(
                **bound
            )
        )
    for name, values in figures.items():
        if bound is not None:
            share = bound["share_of_bound"][name]["median"]
            print(f"{name:<22} {1e3 / Spread(tuple(values)).median:6.1f} ms a step, {share:.3f} of its bound")
        if not name.startswith("dear"):
            continue
        for over, target in {"ddp": TARGET_DEFAULT, **({best_ddp: TARGET_BEST} if best_ddp else {})}.items():
            if over not in figures:
                continue
            ratio = paired_ratio(values, figures[over])
            met = ratio.median >= target
            found[f"{name} over {over}"] = {**ratio.as_json(), "target": target, "met": met}
            print(f"{name} over {over}: x {ratio}, asked {target:g}: {'met' if met else 'MISSED'}")
        if bound is not None:
            met = TARGET_BOUND <= share <= 1 + BOUND_ERROR  # nothing is faster than its bound
            found[f"{name} of the bound"] = {"median": share, "target": TARGET_BOUND, "met": met}
            print(f"{name} of the bound: {share:.3f}, asked {TARGET_BOUND:g}: {'met' if met else 'MISSED'}")
    return found


def train(
    lab: NetLab, settings: Mapping[str, Any], model: str, contenders: list[str], repeats: int, spans: dict[str, float]
) -> list[Any]:
    """Trains one model by every contender in turn, on all hosts; returns what each rank found."""
    seconds = sum(spans.values()) + 45
    return launch(
        "lab.workloads.training:ranks",
        ranks=lab.hosts,
        settings={**settings, **spans, "workload": MODELS[model], "contenders": contenders, "repeats": repeats},
        deadline_s=120 + repeats * len(contenders) * seconds,
        lab=lab,
    )


def measure(
    args: argparse.Namespace, lab: NetLab, rates: list[float], report: Report, model: str, wishes: list[str]
) -> None:
    """Probes for the best of what is wished for, trains, prints the comparisons and adds the case to the report."""
    settings = {"options": {}, "stragglers": "none", "seed": 0}
    spans = {"warmup_s": args.warmup, "window_s": args.window, "tuning_s": args.tuning}

    def probe(texts: list[str]) -> dict[str, float]:
        short = {"warmup_s": min(2.0, args.warmup), "window_s": args.probe}
        results = train(lab, settings, model, texts, 1, short)
        return {name: values[0] for name, values in gradients_per_second(results, args.probe).items()}

    contenders, chosen = tuning.resolve(wishes, probe)
    for wish, choice in chosen.items():
        print(f"{model}: {wish} is {choice['best']}: gradients/s {choice['probed']}", flush=True)
    results = train(lab, settings, model, contenders, args.repeats, spans)
    gradients = gradients_per_second(results, args.window)
    figures = {name: [value / args.hosts for value in values] for name, values in gradients.items()}
    print(f"{model}:")
    for name, runs in results[0]["runs"].items():
        states = [{key: run["stats"][key] for key in ("mode", "decided", "bucket_mb")} for run in runs if run["stats"]]
        if states:
            print(f"{name}: {states}")
    bound = against_bounds(MODELS[model], figures, rates, args.hosts) if rates else None
    best = contender(chosen["ddp:best"]["best"]).name if "ddp:best" in chosen else None
    report.add(
        f"{model}, {args.hosts} hosts, {args.rate}",
        figures,
        checks=results[0]["checks"],
        target=TARGET_DEFAULT,
        notes={
            **summarize(results),
            "best": chosen,
            "bounds": bound,
            "verdicts": comparisons(figures, best, bound),
        },
    )


def main() -> None:
    """Builds the network, measures model by model, and writes ``dear_network.json`` and ``.png``."""
    args = arguments()
    models, contenders = cli.names(args.models), cli.names(args.contenders)
    with NetLab(args.hosts, rate=args.rate) as lab:
        network = lab.describe()
        rates = [lab.measure_rate(0, host) for host in range(1, args.hosts)] if lab.emulated and args.hosts > 1 else []
        network["measured_gbit_s"] = [rate / 1e9 for rate in rates]
        print(f"network: {network}", flush=True)
        if rates and min(rates) < (1 - BOUND_ERROR) * max(rates):
            print("NOTICE: the measured rates differ: this machine is busy, and its figures are not to be quoted")
        report = Report(
            "dear_network",
            script=cli.script_line(),
            unit="iterations/s",
            reference="ddp",
            conditions={
                "models": MODELS,
                "warmup_s": args.warmup,
                "window_s": args.window,
                "tuning_s": args.tuning,
                "probe_s": args.probe,
                **network,
            },
        )
        for model in models:
            wishes = contenders if model == "deep" else [wish for wish in contenders if wish in OTHER_CONTENDERS]
            measure(args, lab, rates, report, model, wishes)
    if args.update:
        report.keep(args.results / f"{report.name}.json")
    report.write(args.results)


if __name__ == "__main__":
    main()
