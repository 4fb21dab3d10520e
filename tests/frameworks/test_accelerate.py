"""Accelerate: scripts that are not touched, under torchext.run, and the call that attaches what was prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from largest import largest
from launching import SCRIPTS, run_workers, skip_without, under_run

skip_without("accelerate")

SCRIPT = str(SCRIPTS / "accelerate_cases.py")
BACKENDS = ["dear", "dear sharded", "prague", "dssync", "hop"]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_workers([SCRIPT, ",".join(["gloo", *BACKENDS])], tmp_path_factory.mktemp("accelerate")).by_backend()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found = {}
    for backend in ("dear", "dear sharded", "prague", "dssync", "hop"):
        ended = run_workers([*under_run(backend), SCRIPT], tmp_path_factory.mktemp("untouched"))
        found[backend] = ended.by_backend()["untouched"]
        said = f"torchext.run: attached Sequential with AdamW to {backend.split()[0]}, 2 workers"
        assert said in ended.errors[0]
    return found


@pytest.mark.parametrize("form", ["dear", "dear sharded"])
@pytest.mark.parametrize("way", ["attached", "untouched"])
def test_dear_is_plain_ddp_in_every_number(way: str, form: str, results: Results, untouched: Results) -> None:
    everyone = results[form] if way == "attached" else untouched[form]
    for expected, given in zip(results["gloo"], everyone, strict=True):
        assert (expected["backend"], given["backend"]) == ("gloo", "dear")
        assert (expected["steps"], given["steps"]) == (None, 12)
        assert len(given["losses"]) == 24
        for name in ("losses", "norms", "model", "optimizer"):
            torch.testing.assert_close(given[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["attached", "untouched"])
def test_files_hold_the_average(way: str, backend: str, results: Results, untouched: Results) -> None:
    everyone = results[backend] if way == "attached" else untouched[backend]
    for given, plain in zip(everyone, results["gloo"], strict=True):
        assert given["backend"] == backend.split()[0]
        assert given["steps"] == 12
        assert len(given["saved"]) == 6
        assert largest(given["saved"]) < 1e-6
        assert given["spread"] == 0.0
        if not backend.startswith("dear"):
            assert max(given["apart"]) > 1e-3
            assert min(given["after"]) > 1e-3  # each went on with its own
            assert given["losses"] != plain["losses"]
            assert sum(given["losses"][12:]) < sum(given["losses"][:12])


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("dear", ""),
        ("dear sharded", "call it on all ranks, or use DeAROptions(form='replicated')"),
        ("hop", "accelerator.save_state() writes the average of all ranks: call it on every rank"),
    ],
)
def test_rank_0_alone_saves_or_is_told_what_to_do(backend: str, said: str, tmp_path: Path) -> None:
    outcome = run_workers([*under_run(backend), str(SCRIPTS / "save_alone.py")], tmp_path)
    errors = [told["error"] for told in outcome.results()]
    assert said in errors[0]
    assert [error == "" for error in errors] == [not said] * 2
