"""Ray: its workers make the group by the backend's name, and meet outside of torch.distributed once an epoch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPTS, run_workers

pytest.importorskip("ray", reason="Ray is not installed")

SCRIPT = str(SCRIPTS / "ray_cases.py")
BACKENDS = ["dear", "prague", "dssync", "hop"]
# Nothing is reported to anybody, no log reaches the driver's terminal in colours.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "NO_COLOR": "1"}


def has_ray_train() -> bool:
    try:
        importlib.import_module("ray.train")
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two actors tell of each backend: they make the call that TorchConfig makes, and reports wait for both."""
    command = [SCRIPT, "actors", ",".join(["gloo", *BACKENDS])]
    return run_workers(command, tmp_path_factory.mktemp("actors"), 1, **QUIET).results()[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_twelve_epochs_in_actors(backend: str, actors: dict[str, Any]) -> None:
    for expected, given in zip(actors["gloo"]["workers"], actors[backend]["workers"], strict=True):
        assert len(given) == len(expected) == 13
        assert (given[-1]["backend"], given[-1]["steps"], given[-1]["spread"]) == (backend, 48, 0.0)
        if backend == "dear":
            losses = [[entry["loss"] for entry in told[:-1]] for told in (given, expected)]
            torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
            torch.testing.assert_close(given[-1]["model"], expected[-1]["model"], rtol=0, atol=1e-6)


# Ray Train takes a second for each report: one backend in each run of the tests, all of them in the slow ones.
@pytest.mark.skipif(not has_ray_train(), reason="ray.train cannot be imported: pip install 'ray[train]'")
@pytest.mark.parametrize(
    "backend", ["prague", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dear", "dssync", "hop"))]
)
def test_twelve_epochs_in_ray_train(backend: str, actors: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    results: dict[str, Any] = run_workers([SCRIPT, "train", backend], tmp_path, 1, **QUIET).results()[0]
    last = results[backend]["last"]
    assert (last["backend"], last["steps"], last["spread"]) == (backend, 48, 0.0)
    if backend == "dear":
        torch.testing.assert_close(last["model"], actors["gloo"]["workers"][0][-1]["model"], rtol=0, atol=1e-6)
