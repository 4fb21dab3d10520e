"""How long does a job of torchrun stand still when a worker dies?

``torchrun --max-restarts`` stops what is left and starts all workers anew; they load the last checkpoint and go on. A
figure is the time from the SIGKILL to the end of the first step of the new attempt, on the slowest rank: with workers
that torchrun starts by itself (``cold``), and by torchext_warm (``warm``), which has imported torch for them. In the
notes stands the start of the same job, from that of torchrun to the end of the first step. Backends that do not go on
are listed with what happened.

Checked before: the weights at the end are those of a job in which nobody died.

    python benchmarks/faults/restart.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for lab

import torch
from lab.report.results import Checks, Report
from lab.run import cli

WORKERS = 2
STEPS, VICTIM_STEP = 12, 6
TARGET_S = 3.0
LIMIT_S = 60.0
STARTED = "start of the job"
WARM = {"cold": [], "warm": ["-m", "torchext_warm"]}


def _job(backend: str, folder: Path, victim_step: int, start: list[str]) -> bool:
    """Runs a job in ``folder``; true if it came to its end. start: what torchrun is to start, before the worker."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", *start]
    command += ["-m", "lab.faults.restart_worker", str(folder), backend, str(STEPS), str(victim_step)]
    here = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            return process.wait(LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _times(folder: Path, attempt: int) -> list[dict[str, float]]:
    return [json.loads((folder / f"{attempt}-{rank}.json").read_text()) for rank in range(WORKERS)]


def _measure(
    backend: str, start: list[str], expected: list[torch.Tensor] | None
) -> tuple[dict[str, float], float] | None:
    """One death: seconds of each part, and the error of the weights; nothing if the job did not go on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.monotonic()
        if not _job(backend, folder, VICTIM_STEP, start):
            return None
        first, second = _times(folder, 0), _times(folder, 1)
        killed = first[1]["killed"]
        begun = max(times["begin"] for times in second)
        imported = max(times["imported"] for times in second)
        ready = max(times["ready"] for times in second)
        end = max(times["step"] for times in second)
        parts = {
            "all": end - killed,
            "until the new processes run": begun - killed,
            "imports": imported - begun,
            "process group, model, checkpoint, attach": ready - imported,
            "first step": end - ready,
            STARTED: max(times["step"] for times in first) - begin,
        }
        weights = torch.load(folder / "weights.pt", weights_only=True)
        pairs = zip(weights, expected or weights, strict=True)
        return parts, max(float((a - b).abs().max()) for a, b in pairs)


def _undisturbed(backend: str) -> list[torch.Tensor]:
    with tempfile.TemporaryDirectory() as name:
        if not _job(backend, Path(name), -1, []):
            raise RuntimeError(f"restart: the undisturbed job failed: {(Path(name) / 'out').read_text()[-2000:]}")
        weights: list[torch.Tensor] = torch.load(Path(name) / "weights.pt", weights_only=True)
        return weights


def main() -> None:
    """Runs and writes ``restart.json`` and its plot."""
    parser = cli.parser(__doc__ or "", contenders="dear,gloo", repeats=5)
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    conditions = {"workers": WORKERS, "monitor interval": 0.1, "target_s": TARGET_S}
    report = Report(
        "restart", script=cli.script_line(), unit="s", reference="cold", higher_is_better=False, conditions=conditions
    )
    for backend in cli.names(args.contenders):
        expected = _undisturbed(backend)
        checks = Checks()
        figures: dict[str, list[float]] = {how: [] for how in WARM}
        parts: dict[str, list[dict[str, Any]]] = {how: [] for how in WARM}
        for _ in range(args.repeats):
            measured = {how: _measure(backend, start, expected) for how, start in WARM.items()}
            failed = [how for how, result in measured.items() if result is None]
            for how in failed:
                print(f"{backend}, {how}: did not go on after the restart", flush=True)
                key = f"{backend}, {how} did not go on"
                report.conditions[key] = report.conditions.get(key, 0) + 1
            if failed:
                continue
            for how, result in measured.items():
                assert result is not None
                seconds, error = result
                checks.confirm(how, error, 1e-6)
                figures[how].append(seconds["all"])
                parts[how].append({name: round(value, 3) for name, value in seconds.items()})
        if figures["cold"]:
            report.add(backend, figures, checks=checks.done, notes={"parts": parts})
    report.write(args.results)


if __name__ == "__main__":
    main()
