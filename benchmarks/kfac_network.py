"""What do SPD's and PAD's schedules save over plain distributed K-FAC? Four hosts at 1 Gb/s, real models and compute.

Four hosts are network namespaces behind a switch, each link limited both ways (lab/netlab.py), one worker a host. An
MLP of eight layers 1024 wide (16 rows a worker), and ResNet-20 on 32 x 32 images (8 rows). The reference, d-kfac,
all-reduces every factor by itself in every step and inverts everything everywhere. Factors in every step; inverses in
every step, or every 10. The workers share this machine's cores: where all invert everything that costs more here than
on four machines, which is why the notes hold the time spent inverting.

Needs root, iproute2 and util-linux; anywhere else it says so and runs over loopback, which answers another question.

    python benchmarks/kfac_network.py
    python benchmarks/kfac_network.py --models wide8 --inverses 10 --update    # one case anew, into what is there
"""

from __future__ import annotations

from typing import Any

from lab import cli
from lab.launch import launch
from lab.netlab import NetLab
from lab.results import Report, paired_ratio

CONTENDERS = "d-kfac,spd,pad,auto,sgd"
TARGETS = {"spd": 1.15, "pad": 1.36}
HOSTS = 4


def main() -> None:
    """Builds the network, checks and times, and writes the results."""
    parser = cli.parser(__doc__ or "", contenders=CONTENDERS, repeats=3)
    parser.add_argument("--models", default="wide8,resnet20")
    parser.add_argument("--inverses", default="1,10", help="steps from one update of the inverses to the next")
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
            for inverses in map(int, cli.names(args.inverses)):
                settings: dict[str, Any] = {
                    "models": [model],
                    "contenders": cli.names(args.contenders),
                    "repeats": 1 if args.quick else args.repeats,
                    "window_s": 0.5 if args.quick else args.window,
                    "factors": 1,
                    "inverses": inverses,
                    "check_steps": 3,
                    "cycle": inverses,
                    "rows": {model: 8 if model == "resnet20" else 16},
                }
                results = launch("kfac_iteration:ranks", ranks=HOSTS, settings=settings, deadline_s=900, lab=lab)
                found = results[0][model]
                verdicts = {}
                for name, target in TARGETS.items():
                    if name in found["figures"] and "d-kfac" in found["figures"]:
                        ratio = paired_ratio(found["figures"]["d-kfac"], found["figures"][name])
                        verdicts[name] = {**ratio.as_json(), "target": target, "met": ratio.median >= target}
                report.add(
                    f"{model}, inverses every {inverses}",
                    found["figures"],
                    checks=found["checks"],
                    target=TARGETS["pad"],
                    notes={"verdicts": verdicts, "counters": found["counters"], "rows": settings["rows"][model]},
                )
    if args.update:
        report.keep(args.results / f"{report.name}.json")
    report.write(args.results, log_scale=True)


if __name__ == "__main__":
    main()
