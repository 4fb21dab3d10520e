"""Test accuracies of examples/train_digits.py at equal samples, over seeds and ways to train."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples"))

from processes import require_averages, run, torchrun


@dataclass(frozen=True)
class Variant:
    """A backend, with options of its own."""

    backend: str
    options: tuple[str, ...] = ()
    """``"name=value"``, as the example's ``--option`` takes them."""

    @property
    def name(self) -> str:
        """Its name in tables: ``dssync schedule=random``."""
        return " ".join([self.backend, *self.options])


def equal_samples(
    variants: Sequence[Variant], *, seeds: int, workers: int, epochs: int, deadline_s: float
) -> dict[str, Any]:
    """Trains every variant with every seed, and checks that all saw as many samples.

    Args:
        variants: What to train.
        seeds: 0 up to this.
        workers: Processes of a run.
        epochs: Of a run.
        deadline_s: Of a run.

    Returns:
        ``accuracies`` of the exact average of all replicas, by variant and seed; ``consensus_distances``, by variant,
        seed and epoch, ``||x - mean|| / ||mean||`` of rank 0's replica (None where all hold one model); with
        ``workers``, ``epochs`` and ``samples``.
    """
    accuracies: dict[str, list[float]] = {variant.name: [] for variant in variants}
    distances: dict[str, list[list[float | None]]] = {variant.name: [] for variant in variants}
    samples: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        log_file, output_file = Path(folder) / "log.json", Path(folder) / "output.txt"
        for seed in range(seeds):
            for variant in variants:
                arguments = [f"--backend={variant.backend}", f"--seed={seed}", f"--epochs={epochs}"]
                arguments += [f"--option={option}" for option in variant.options]
                script = ROOT / "examples/train_digits.py"
                command = torchrun(workers, script, *arguments, f"--log-file={log_file}")
                with output_file.open("w") as output:
                    status = run(command, deadline=deadline_s, env={"OMP_NUM_THREADS": "1"}, output=output)
                if status != 0:
                    raise SystemExit(f"{output_file.read_text()}\n{variant.name}, seed {seed}: exit status {status}")
                log = json.loads(log_file.read_text())
                require_averages(log["stats"])
                accuracies[variant.name].append(log["accuracy"])
                distances[variant.name].append([epoch["consensus_distance"] for epoch in log["epochs"]])
                samples.add(log["steps"][-1]["samples"])
                print(f"equal samples  {variant.name:<32} seed {seed}  accuracy {log['accuracy']:.2%}", flush=True)
    if len(samples) != 1:
        raise SystemExit(f"the runs did not see the same number of samples: {sorted(samples)}")
    return {
        "workers": workers,
        "epochs": epochs,
        "samples": samples.pop(),
        "accuracies": accuracies,
        "consensus_distances": distances,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns mean, standard deviation, lowest and highest."""
    return {
        "mean": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
        "lowest": min(values),
        "highest": max(values),
    }
