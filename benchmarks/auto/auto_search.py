"""How long does the search for the fastest way take, by the number of a model's tensors?

Models of random layers whose sizes grow, half of their tensors small (biases), on tables of a network of 4 and of 64
ranks; the same with every tenth layer a Linear whose rows could be sent, and with tensors of two kinds. Nothing is
measured but the search itself, in one thread: it takes no network and no tensor.

Checked first: the chosen candidate's predicted step is the simulator's, and it sends every gradient once.

    python benchmarks/auto/auto_search.py
    python benchmarks/auto/auto_search.py --quick
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.report.results import Checks, Report, in_turn
from lab.run import cli

from torchext import _C

TENSORS = (100, 300, 1000)
MEGABYTES = 100
COMPUTE_SECONDS = 0.3
TARGET_SECONDS = 1.0
ROWS = 16
VARIANTS = ("plain", "rows", "two kinds")


def make_profile(tensors: int, variant: str) -> _C.StepProfile:
    """Returns a model of so many gradients, the last layer's first; every second one is a bias."""
    draw = random.Random(tensors)
    weights = [draw.uniform(0.5, 1.5) * 2 ** (3 * place / tensors) for place in range(tensors // 2)]
    scale = MEGABYTES * 1e6 / sum(weights)
    gradients, layers = [], []
    for place, weight in enumerate(reversed(weights)):
        first_use = len(weights) - 1 - place
        nbytes = 4 * round(weight * scale / 4)
        ready = COMPUTE_SECONDS * 2 / 3 * (place + 1) / len(weights)
        layer = -1
        if variant == "rows" and place % 10 == 0:
            layer, width = len(layers), max(1, round((nbytes / 4) ** 0.5))
            layers.append(_C.LayerRows(kind="linear", rows=ROWS, height=width, width=width))
        kind = place % 2 if variant == "two kinds" else 0
        for size in (nbytes, 4096):
            gradients.append(_C.Gradient(nbytes=size, ready_seconds=ready, first_use=first_use, kind=kind, layer=layer))
    forward = [COMPUTE_SECONDS / 3 / len(weights)] * len(weights)
    backward = COMPUTE_SECONDS * 2 / 3
    return _C.StepProfile(forward_seconds=forward, backward_seconds=backward, gradients=gradients, layers=layers)


def make_link(ranks: int) -> _C.LinkTables:
    """Returns tables of a network at 1 Gb/s, with the knee that short messages have."""
    network = _C.Network(ranks=ranks, latency_seconds=2e-4, bytes_per_second=119e6)

    def table(seconds: Callable[[int], float]) -> _C.CostTable:
        return _C.CostTable([(size, seconds(size) * (0.7 if size < 1 << 17 else 1)) for size in sizes])

    sizes = [4096 * 4**power for power in range(7)]
    halves = {
        name: table(lambda size, name=name: _C.collective_seconds(name, network, size) / 2)
        for name in ("ring", "direct")
    }
    return _C.LinkTables(
        network=network,
        all_reduce=table(lambda size: _C.collective_seconds("ring", network, size)),
        transports=[_C.Transport(algorithm=name, reduce_scatter=t, all_gather=t) for name, t in halves.items()],
        rows=table(lambda size: (ranks - 1) * (2e-4 + size / 119e6)),
        copy_bytes_per_second=5e9,
        operations_per_second=1e11,
    )


def search_seconds(profile: _C.StepProfile, link: _C.LinkTables) -> float:
    """Returns the time of one search."""
    begun = time.perf_counter()
    _C.search_strategies(profile, link)
    return time.perf_counter() - begun


def error_of(profile: _C.StepProfile, link: _C.LinkTables) -> float:
    """Returns how far the chosen candidate is off the simulator; infinity where a gradient is lost or sent twice."""
    (chosen,) = [candidate for candidate in _C.search_strategies(profile, link) if candidate.chosen]
    as_rows = set(chosen.factor_layers)
    expected = [place for place, gradient in enumerate(profile.gradients) if gradient.layer not in as_rows]
    if sorted(place for bucket in chosen.buckets for place in bucket) != expected:
        return float("inf")
    return abs(_C.simulate_candidate(profile, link, chosen).step_seconds / chosen.step_seconds - 1)


def main() -> None:
    """Checks and times every model and network."""
    arguments = cli.parser(__doc__ or "", contenders=",".join(VARIANTS), repeats=9).parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    report = Report(
        "auto_search",
        script=cli.script_line(),
        unit="s",
        reference="plain",
        higher_is_better=False,
        conditions={"megabytes": MEGABYTES, "rows": ROWS, "target_s": TARGET_SECONDS},
    )
    for ranks in (4, 64):
        link = make_link(ranks)
        for tensors in TENSORS:
            profiles = {variant: make_profile(tensors, variant) for variant in cli.names(arguments.contenders)}
            checks = Checks()
            for variant, profile in profiles.items():
                checks.confirm(variant, error_of(profile, link), 1e-12)
            figures = in_turn({v: lambda p=p, k=link: search_seconds(p, k) for v, p in profiles.items()}, repeats)
            report.add(f"{tensors} tensors, {ranks} ranks", figures, checks=checks.done)
    report.write(arguments.results, log_scale=True)


if __name__ == "__main__":
    main()
