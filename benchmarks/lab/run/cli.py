"""The command line that the benchmark scripts share."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from lab.net.netlab import exit_on_signal
from lab.report.results import RESULTS_FOLDER

ROOT = Path(__file__).resolve().parents[3]


def parser(doc: str, *, contenders: str, repeats: int) -> argparse.ArgumentParser:
    """Returns a parser with the common options; ``doc`` is the script's docstring."""
    signal.signal(signal.SIGTERM, exit_on_signal)  # a benchmark that is stopped leaves no ranks and no files behind
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="one short pass, to see that it runs; no figure to quote")
    made.add_argument("--contenders", default=contenders, help=f"separated by commas; default: {contenders}")
    made.add_argument("--repeats", type=int, default=repeats, help=f"of each contender, in turn; default: {repeats}")
    made.add_argument("--results", type=Path, default=RESULTS_FOLDER, help="folder of the JSON and PNG files")
    return made


def names(text: str) -> list[str]:
    """Splits a list at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def script_line() -> str:
    """Returns the command that takes the figures again, from the repository's root, without local paths."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix()
    kept: list[str] = []
    skip = False
    for argument in sys.argv[1:]:
        if skip or argument.startswith("--results="):
            skip = False
        elif argument == "--results":
            skip = True
        else:
            kept.append(argument)
    return shlex.join(["python", script, *kept])
