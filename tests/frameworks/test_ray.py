"""Ray: its workers make the group by the backend's name, and meet outside of torch.distributed once an epoch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPTS, run_workers, skip_without

skip_without("ray")

SCRIPT = str(SCRIPTS / "ray_cases.py")
BACKENDS = ["dear", "dear sharded", "prague", "dssync", "hop"]
SETTINGS = {
    # Nothing is reported to anybody, no log reaches the driver's terminal in colours.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "NO_COLOR": "1",
    # A report is looked for as often as workers make one; every two seconds by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Ray gives its workers less of the processors than others get: what runs beside would starve them.
    "RAY_worker_niceness": "0",
}


def has_ray_train() -> bool:
    """Whether what it imports is installed; importing it takes seconds."""
    needed = ("fsspec", "pandas", "pyarrow", "requests", "tensorboardX", "pydantic")
    return all(importlib.util.find_spec(name) is not None for name in needed)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the workers tell of each backend.

    Two actors make the call that TorchConfig makes, and reports wait for both. Then, in the same Ray, its own.
    """
    ways = [f"actors={','.join(['gloo', *BACKENDS])}", *(["train=prague"] if has_ray_train() else [])]
    return run_workers([SCRIPT, *ways], tmp_path_factory.mktemp("ray"), 1, is_forked=False, **SETTINGS).results()[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_twelve_epochs_in_actors(backend: str, results: dict[str, Any]) -> None:
    for expected, given in zip(results["actors"]["gloo"], results["actors"][backend], strict=True):
        assert len(given) == len(expected) == 13
        assert (given[-1]["backend"], given[-1]["steps"], given[-1]["spread"]) == (backend.split()[0], 48, 0.0)
        if backend.startswith("dear"):
            losses = [[entry["loss"] for entry in told[:-1]] for told in (given, expected)]
            torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
            torch.testing.assert_close(given[-1]["model"], expected[-1]["model"], rtol=0, atol=1e-6)


# Ray Train takes ten seconds to start: one backend in each run of the tests, all of them in the slow ones.
@pytest.mark.skipif(not has_ray_train(), reason="ray.train cannot be imported: pip install 'ray[train]'")
@pytest.mark.parametrize(
    "backend", ["prague", *(pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS if name != "prague")]
)
def test_twelve_epochs_in_ray_train(backend: str, results: dict[str, Any], tmp_path: Path) -> None:
    told = results["train"]
    if backend != "prague":
        command = [SCRIPT, f"train={backend}"]
        told = run_workers(command, tmp_path, 1, is_forked=False, **SETTINGS).results()[0]["train"]
    last = told[backend]
    assert (last["backend"], last["steps"], last["spread"]) == (backend.split()[0], 48, 0.0)
    if backend.startswith("dear"):
        torch.testing.assert_close(last["model"], results["actors"]["gloo"][0][-1]["model"], rtol=0, atol=1e-6)
