"""Runs random training scripts on every form, and prints each that is wrong, shrunk: ``fuzz.py [first [last]]``.

python tests/everyday/fuzz.py 0 200              # seeds 0 to 199
python tests/everyday/fuzz.py 17 --print         # the script of seed 17, as a file for torchrun
python tests/everyday/fuzz.py 17 --forms dear-sharded,hop
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

import forms
from campaign import Campaign
from generator import random_script


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int, default=0, nargs="?")
    parser.add_argument("last", type=int, nargs="?", help="the first seed that is left out; first + 1 by default")
    parser.add_argument("--print", action="store_true", help="prints the scripts and runs nothing")
    parser.add_argument("--forms", default=",".join(forms.FORMS))
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    parser.add_argument("--waits", action="store_true", help="with sync.wait() after each step")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first, options.last if options.last is not None else options.first + 1)
    if options.print:
        for seed in seeds:
            print(random_script(seed).standalone())
        return 0
    start = time.monotonic()
    campaign = Campaign(functools.partial(print, flush=True), shrink=not options.no_shrink, waits=options.waits)
    campaign.run(seeds, options.forms.split(","), options.jobs)
    for refusal, count in campaign.refusals.most_common():
        print(f"{count:5} {refusal}")
    print(campaign.table(), f"in {time.monotonic() - start:.0f} s")
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
