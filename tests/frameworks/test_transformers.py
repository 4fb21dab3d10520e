"""transformers.Trainer with ``TorchextCallback``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from largest import largest
from launching import SCRIPTS, run_workers, skip_without, under_run

skip_without("transformers", "accelerate")  # the Trainer needs the latter

BACKENDS = ["dear", "dear sharded", "prague", "dssync", "hop"]
CASES = {"steps": 3, "resumed": 1, "best": 2}  # and how often each saves
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    script = str(SCRIPTS / "transformers_cases.py")
    return run_workers([script, ",".join(["gloo", *BACKENDS])], tmp_path_factory.mktemp("transformers")).by_backend()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Under torchext.run."""
    script, found = str(SCRIPTS / "transformers_cases.py"), {}
    for backend in ("dear", "dear sharded", "hop"):
        ended = run_workers([*under_run(backend), script], tmp_path_factory.mktemp("untouched"))
        lines = [line for line in ended.errors[0].splitlines() if line.startswith("torchext.run: ")]
        assert lines == [f"torchext.run: attached Net with AdamW to {backend.split()[0]}, 2 workers"] * 3
        found[backend] = ended.by_backend()["untouched"]
    return found


@pytest.mark.parametrize("form", ["dear", "dear sharded"])
@pytest.mark.parametrize("way", ["callback", "untouched"])
def test_dear_is_plain_ddp_in_every_number(way: str, form: str, results: Results, untouched: Results) -> None:
    everyone = results[form] if way == "callback" else untouched[form]
    for expected, given in zip(results["gloo"], everyone, strict=True):
        assert (expected["backend"], given["backend"]) == ("gloo", "dear")
        for case in CASES:
            assert given[case]["attached"]
            assert not expected[case]["attached"]
            assert len(given[case]["log"]) == len(expected[case]["log"]) > 9
            for ours, theirs in zip(given[case]["log"], expected[case]["log"], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
            torch.testing.assert_close(given[case]["model"], expected[case]["model"], rtol=0, atol=1e-6)
        torch.testing.assert_close(given["steps"]["optimizer"], expected["steps"]["optimizer"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", [*BACKENDS, "untouched"])
def test_evaluation_and_files_hold_the_average(way: str, results: Results, untouched: Results) -> None:
    for given, plain in zip(results.get(way) or untouched["hop"], results["gloo"], strict=True):
        for case, saves in CASES.items():
            assert len(given[case]["saved"]) == saves
            assert largest(given[case]["saved"]) < 1e-6
            assert given[case]["evaluated"] == [0.0] * len(plain[case]["evaluated"]) != []
            assert given[case]["spread"] == 0.0
            assert not given[case]["own state_dict"]
            assert given[case]["attached"]
            assert given[case]["best"] == 0.0
            if not way.startswith("dear"):
                assert given[case]["apart"] > 1e-3
                assert (case == "resumed") == (given[case]["after"] == [])
                assert all(spread > 1e-3 for spread in given[case]["after"])  # each went on with its own
                evaluated = [entry["eval_loss"] for entry in given[case]["log"] if "eval_loss" in entry]
                assert evaluated[-1] < 2.7  # 2.77 knows nothing
