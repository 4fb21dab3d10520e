"""What ``make demo`` runs: the digits example on four processes, with gloo and then with prague, side by side.

    python examples/demo.py
    python examples/demo.py --step-ms 10 --straggler 3      # one of the workers three times slower

Prints a table of the final accuracies and writes demo.png (loss over samples, time per step) and each run's log to
demo-output/. Stops with the failed run's exit status when one fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from processes import installed, require_averages, run, torchrun

TRAINING_SCRIPT = Path(__file__).with_name("train_digits.py")
BACKENDS = ["gloo", "prague"]
COLOURS = {
    "gloo": "tab:grey",
    "prague": "tab:blue",
    "dear": "tab:orange",
    "dssync": "tab:green",
    "hop": "tab:red",
}


def check_requirements(backends: list[str]) -> None:
    """Say what is missing before anything runs, rather than after the first minute."""
    needed = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
    missing = [package for module, package in needed.items() if not installed(module)]
    if missing:
        raise SystemExit(f"demo: missing packages; type: {sys.executable} -m pip install {' '.join(missing)}")
    if set(backends) - {"gloo"} and not installed("torchext"):
        raise SystemExit(
            "demo: torchext is not installed; `make demo` installs it first, or type: "
            "pip install --no-build-isolation ."
        )


def train(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """One training run under torchrun, its output streamed to this terminal; returns its log."""
    log_file = args.output / f"{backend}.json"
    log_file.unlink(missing_ok=True)
    command = torchrun(
        args.workers,
        TRAINING_SCRIPT,
        f"--backend={backend}",
        f"--epochs={args.epochs}",
        f"--seed={args.seed}",
        f"--step-ms={args.step_ms}",
        f"--straggler={args.straggler}",
        f"--min-accuracy={args.min_accuracy}",
        f"--log-file={log_file}",
    )
    print(f"\n== {backend}: {args.workers} processes, {args.epochs} epochs", flush=True)
    try:
        # One thread a worker: several processes share this machine, and torchrun would say so at length.
        status = run(command, deadline=args.deadline, env={"OMP_NUM_THREADS": "1"})
    except TimeoutError as error:
        raise SystemExit(f"demo: the {backend} run did not end: {error}") from None
    if status != 0:
        print(f"demo: the {backend} run failed with status {status}; its error is above", file=sys.stderr)
        raise SystemExit(status)
    log: dict[str, Any] = json.loads(log_file.read_text())
    try:
        require_averages(log["stats"])
    except RuntimeError as error:
        raise SystemExit(f"demo: the {backend} run is not valid: {error}") from None
    return log


def step_ms(log: dict[str, Any]) -> list[float]:
    """Milliseconds of each step of rank 0."""
    return [step["ms"] for step in log["steps"]]


def print_table(logs: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'backend':<10}{'test accuracy':>15}{'samples':>10}{'seconds':>10}{'mean step':>14}")
    for backend, log in logs.items():
        # Not rank 0's own steps: under prague it may run ahead and wait for the others at the end of the epoch.
        samples, mean = log["steps"][-1]["samples"], 1000.0 * log["seconds"] / len(log["steps"])
        print(f"{backend:<10}{log['accuracy']:>15.2%}{samples:>10,}{log['seconds']:>10.1f}{mean:>11.1f} ms")


def draw(logs: dict[str, dict[str, Any]], path: Path) -> None:
    """Two panels: the loss over the samples seen by all workers, and the time of each step of rank 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for backend, log in logs.items():
        steps_an_epoch = len(log["steps"]) // len(log["epochs"])
        epoch_ends = [step["samples"] for step in log["steps"][steps_an_epoch - 1 :: steps_an_epoch]]
        colour = COLOURS.get(backend)
        left.plot(epoch_ends, [epoch["loss"] for epoch in log["epochs"]], color=colour, label=backend)
        right.plot(step_ms(log), ".", markersize=3, alpha=0.4, color=colour)
        median = statistics.median(step_ms(log))
        right.axhline(median, color=colour, label=f"{backend}: median {median:.1f} ms")
    left.set(xlabel="samples seen by all workers", ylabel="training loss (mean of an epoch)", yscale="log")
    right.set(xlabel="step of rank 0", ylabel="ms", yscale="log")
    left.legend()
    right.legend()
    figure.suptitle("scikit-learn digits")
    figure.savefig(path, dpi=130)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the digits example with gloo and prague and compare them.")
    add = parser.add_argument
    add("--backends", nargs="+", default=BACKENDS, metavar="NAME", help=f"default: {' '.join(BACKENDS)}")
    add("--workers", type=int, default=4, help="processes a run (default: %(default)s)")
    add("--epochs", type=int, default=20, help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--step-ms", type=float, default=0.0, metavar="MS", help="emulate steps of at least this length by sleeping")
    add("--straggler", type=float, default=1.0, metavar="K", help="the last rank's --step-ms is K times longer")
    add("--min-accuracy", type=float, default=0.97, metavar="SHARE", help="a run below fails (default: %(default)s)")
    add("--deadline", type=float, default=300.0, metavar="S", help="seconds a run may take (default: %(default)s)")
    add("--output", type=Path, default=Path("demo-output"), metavar="FOLDER", help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # So that `kill` ends the workers too: the exception unwinds through the code that ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    check_requirements(args.backends)
    args.output.mkdir(parents=True, exist_ok=True)
    logs = {backend: train(backend, args) for backend in args.backends}
    print_table(logs)
    picture = args.output / "demo.png"
    draw(logs, picture)
    print(f"\n{picture} shows the loss and the step times; the logs of the runs lie beside it.")


if __name__ == "__main__":
    main()
