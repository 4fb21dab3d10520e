"""What do SPD's and PAD's schedules save over plain distributed K-FAC? Four hosts at 1 Gb/s, real models and compute.

Four hosts are network namespaces behind a switch, each link limited both ways (netlab.py), one worker a host. An MLP of
eight layers 1024 wide (16 rows a worker), and ResNet-20 on 32 x 32 images (8 rows). The reference, d-kfac, all-reduces
every factor by itself and inverts everything everywhere. In the committed results it sent factors in every step; today
it does where inverses are made, so that only inverses in every step compare with them. Factors and inverses in every
step; inverses every 10; factors every 10 and inverses every 100, where what is asked is a ratio over SGD. Contenders
take turns every step, or every tenth of a cycle of the inverses that is longer than ten, so that all have the same
share of what a shared machine does meanwhile. The workers share this machine's cores: where all invert everything that
costs more here than on four machines, which is why the notes hold the time spent inverting.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/kfac/kfac_network.py
    python benchmarks/kfac/kfac_network.py --models wide8 --intervals 1:10 --update  # one case anew, into what is there
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.net.netlab import NetLab
from lab.report.results import Report, paired_ratio
from lab.run import cli
from lab.run.launch import launch

CONTENDERS = "d-kfac,spd,pad,auto,sgd"
TARGETS = {"spd": 1.15, "pad": 1.36}
OVER_SGD = 1.15  # at most, with factors every 10 and inverses every 100 steps
HOSTS = 4


def comparisons(figures: dict[str, list[float]], seldom: bool) -> dict[str, Any]:
    """What is asked of each strategy: a speed-up over d-kfac, or with seldom updates a ratio over SGD."""
    found = {}
    for name in figures:
        if seldom and name != "sgd" and "sgd" in figures:
            ratio = paired_ratio(figures[name], figures["sgd"])
            found[name] = {**ratio.as_json(), "over": "sgd", "target": OVER_SGD, "met": ratio.median <= OVER_SGD}
        elif not seldom and name in TARGETS and "d-kfac" in figures:
            ratio = paired_ratio(figures["d-kfac"], figures[name])
            found[name] = {**ratio.as_json(), "target": TARGETS[name], "met": ratio.median >= TARGETS[name]}
    if not seldom and {"spd", "pad"} <= figures.keys():
        ratio = paired_ratio(figures["spd"], figures["pad"])
        found["pad over spd"] = {**ratio.as_json(), "over": "spd", "target": 1.0, "met": ratio.median > 1}
    return found


def main() -> None:
    """Builds the network, checks and times, and writes the results."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=3)
    parser.add_argument("--models", default="wide8,resnet20")
    parser.add_argument(
        "--intervals", default="1:1,1:10,10:100", help="steps between updates of the factors, and of the inverses"
    )
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways")
    parser.add_argument("--window", type=float, default=5.0, help="seconds of each repeat, at least")
    parser.add_argument("--update", action="store_true", help="keep the other cases of the results that are there")
    args = parser.parse_args()
    report = Report(
        "kfac_network",
        script=cli.script_line(),
        unit="ms/iteration",
        reference="d-kfac",
        higher_is_better=False,
        conditions={"hosts": HOSTS, "rate": args.rate, "window_s": args.window},
    )
    with NetLab(HOSTS, rate=args.rate) as lab:
        report.conditions.update(lab.describe())
        for model in cli.names(args.models):
            for intervals in cli.names(args.intervals):
                factors, inverses = map(int, intervals.split(":"))
                settings: dict[str, Any] = {
                    "models": [model],
                    "contenders": cli.names(args.contenders),
                    "repeats": 1 if args.quick else args.repeats,
                    "window_s": 0.5 if args.quick else args.window,
                    "factors": factors,
                    "inverses": inverses,
                    "check_steps": 3,
                    "cycle": inverses,
                    "parts": min(10, inverses),
                    "rows": {model: 8 if model == "resnet20" else 16},
                }
                results = launch("kfac_iteration:ranks", ranks=HOSTS, settings=settings, deadline_s=1800, lab=lab)
                found = results[0][model]
                every = f"inverses every {inverses}"
                report.add(
                    f"{model}, {every}" if factors == 1 else f"{model}, factors every {factors}, {every}",
                    found["figures"],
                    checks=found["checks"],
                    target=TARGETS["pad"] if factors == 1 else None,
                    notes={
                        "verdicts": comparisons(found["figures"], factors > 1),
                        "counters": found["counters"],
                        "rows": settings["rows"][model],
                    },
                )
    if args.update:
        report.keep(args.results / f"{report.name}.json")
    report.write(args.results, log_scale=True)


if __name__ == "__main__":
    main()
