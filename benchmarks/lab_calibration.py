"""Can the lab be trusted on this machine? Link rates against those set, emulated compute against what was asked.

Run it before any figure is taken: rates should be within 5 % of those set, the step of 8 sleeping processes within a
few per cent of 50 ms. Nothing is written.

    python benchmarks/lab_calibration.py
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from lab.net.netlab import NetLab
from lab.run.launch import launch
from lab.run.rank import Rank
from lab.workloads.emulated import EmulatedModel, measure_overhead


def ranks(rank: Rank) -> dict[str, Any]:
    """Rank function: the emulation alone, in all processes at once."""
    model = EmulatedModel(layers=4, parameter_bytes=4_000_000, forward_ms=17, backward_ms=33)
    rank.board.barrier()
    return dataclasses.asdict(measure_overhead(model, steps=rank.settings["steps"]))


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,1gbit,5gbit")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print(f"load average {os.getloadavg()}, {len(os.sched_getaffinity(0))} cores")
    for rate in args.rates.split(","):
        with NetLab(3, rate=rate) as lab:
            if not lab.emulated:
                break
            one, two = (lab.measure_rate(0, 1, flows=flows) / lab.rate_bits for flows in (1, 4))
            print(f"link {rate:>8}: measured {one:.3f} of it by one connection, {two:.3f} by four")
    results = launch("lab_calibration:ranks", ranks=args.ranks, settings={"steps": args.steps})
    for key in ("step_ms", "target_ms", "cpu_ms", "drift", "latest_ms"):
        values = [result[key] for result in results]
        print(f"emulated compute, {args.ranks} processes: {key:<10} {min(values):8.3f} to {max(values):8.3f}")


if __name__ == "__main__":
    main()
