"""Accelerate: scripts that are not touched, under torchext.run, and the call that attaches what was prepared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launching import SCRIPTS, run_workers

pytest.importorskip("accelerate", reason="Accelerate is not installed")

SCRIPT = str(SCRIPTS / "accelerate_cases.py")
BACKENDS = ["dear", "prague", "dssync", "hop"]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_workers([SCRIPT, ",".join(["gloo", *BACKENDS])], tmp_path_factory.mktemp("accelerate")).by_backend()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found = {}
    for backend in ("dear", "hop"):
        command = ["-m", "torchext.run", "--backend", backend, SCRIPT]
        ended = run_workers(command, tmp_path_factory.mktemp("untouched"))
        assert f"torchext.run: attached Sequential with AdamW to {backend}, 2 workers" in ended.errors[0]
        found[backend] = ended.by_backend()["untouched"]
    return found


@pytest.mark.parametrize("way", ["attached", "untouched"])
def test_dear_is_plain_ddp_in_every_number(way: str, results: Results, untouched: Results) -> None:
    everyone = results["dear"] if way == "attached" else untouched["dear"]
    for expected, given in zip(results["gloo"], everyone, strict=True):
        assert (expected["backend"], given["backend"]) == ("gloo", "dear")
        assert (expected["steps"], given["steps"]) == (None, 12)
        assert len(given["losses"]) == 24
        for name in ("losses", "norms", "model", "optimizer"):
            torch.testing.assert_close(given[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", [*BACKENDS, "untouched"])
def test_files_hold_the_average(way: str, results: Results, untouched: Results) -> None:
    for given, plain in zip(results.get(way) or untouched["hop"], results["gloo"], strict=True):
        assert given["backend"] == ("hop" if way == "untouched" else way)
        assert given["steps"] == 12
        assert max(given["saved"]) < 1e-6
        assert given["spread"] == 0.0
        if way != "dear":
            assert max(given["apart"]) > 1e-3
            assert given["losses"] != plain["losses"]
            assert sum(given["losses"][12:]) < sum(given["losses"][:12])
