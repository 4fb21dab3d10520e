"""Do everyday training scripts end as with plain DDP, on every backend?

Random training scripts (tests/everyday: a generator from a seed) run as two ranks on plain DDP over Gloo, and on
``prague``, ``dssync``, ``hop`` and three forms of ``dear``, each set up so that it is exactly plain DDP. An outcome is
"equal" (final parameters, and what the script looked at on its way, to 1e-5), "refused" (an error of torchext's own on
all ranks) or wrong: another result, a hang, an error of another kind, or an error on one rank alone. What is wrong is
run again in new processes, and kept with the smallest script that shows it. There is nothing to time: the result is a
table, ``everyday_scripts.json``.

    python benchmarks/everyday/everyday_scripts.py          # 2,000 scripts: an hour on two idle cores
    python benchmarks/everyday/everyday_scripts.py --first 2000  # other ones
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

from lab.run import cli
from lab.run.machine import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "everyday"))

from campaign import Campaign
from forms import FORMS

WORLD_SIZE = 2


def main() -> int:
    """Runs the scripts and writes what became of them."""
    parser = cli.parser(__doc__, contenders=",".join(FORMS), repeats=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--scripts", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    options = parser.parse_args()
    count = 20 if options.quick else options.scripts
    campaign = Campaign(functools.partial(print, flush=True), shrink=True)
    campaign.run(range(options.first, options.first + count), cli.names(options.contenders), options.jobs)
    print(campaign.table())
    if not options.quick:
        machine = describe_machine()
        result = {"script": cli.script_line(), "machine": machine, "world_size": WORLD_SIZE, **campaign.as_json()}
        (options.results / "everyday_scripts.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
