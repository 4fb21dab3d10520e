"""Lightning: a script that names the backend, and nothing else of torchext."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from largest import largest
from launching import SCRIPTS, run_workers, skip_without

skip_without("lightning")

BACKENDS = ["dear", "dear sharded", "prague", "dssync", "hop"]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    script = str(SCRIPTS / "lightning_cases.py")
    command = [script, ",".join(["gloo", *BACKENDS])]
    ended = run_workers(command, tmp_path_factory.mktemp("lightning"), is_forked=False)  # sees what has been imported
    assert "optimizer.step()` has been overridden" not in ended.errors[0]
    assert ended.errors[0].count("torchext: attached Net with AdamW to dear, 2 workers") == 6  # in two forms
    return ended.by_backend()


@pytest.mark.parametrize("form", ["dear", "dear sharded"])
def test_dear_is_plain_ddp_in_every_number(form: str, results: Results) -> None:
    for expected, given in zip(results["gloo"], results[form], strict=True):
        assert (expected["backend"], given["backend"]) == ("gloo", "dear")
        assert expected["fit"]["steps"] == 0
        assert given["fit"]["steps"] == 15  # as seen in front of the last batch
        for case in ("fit", "resumed", "twice", "manual 1", "manual 2"):
            for name in ("losses", "model"):
                torch.testing.assert_close(given[case][name], expected[case][name], rtol=0, atol=1e-6)
        for name in ("test", "optimizer", "last"):
            torch.testing.assert_close(given[name], expected[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(given["fit"]["logged"], expected["fit"]["logged"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_and_files_hold_the_average(backend: str, results: Results) -> None:
    for given, plain in zip(results[backend], results["gloo"], strict=True):
        for case in ("fit", "resumed", "twice", "manual 1"):
            assert given[case]["validated"] == [0.0] * len(plain[case]["validated"]) != []
            assert given[case]["spread"] == 0.0
        assert len(given["fit"]["files"]) == 5
        assert largest(given["fit"]["files"]) < 1e-6
        if not backend.startswith("dear"):
            assert max(given["fit"]["apart"]) > 1e-3  # each had its own beside the file
            assert given["fit"]["losses"] != plain["fit"]["losses"]
            assert given["fit"]["losses"][-1] < given["fit"]["losses"][1]
        assert given["last"] == {"distance": 0.0, "step": 16}
        assert given["test"] == results[backend][0]["test"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_attached(backend: str, results: Results) -> None:
    for rank, given in enumerate(results[backend]):
        assert given["kept"].count("TorchextCallback") == 1
        assert given["manual 1"]["steps"] == 4
        assert given["manual 2"]["steps"] == 4
        assert not given["manual 2"]["said"], rank
        assert not given["patched"]


def test_the_callback_alone_imports_nothing(results: Results) -> None:
    assert results["start"] == [{"callbacks": ["TorchextCallback"], "imported": False}] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_in_validation_leaves_the_trainer_as_it_was(backend: str, results: Results) -> None:
    for given in results[backend]:
        assert given["failed"] == {"error": "'in validation'", "patched": False}
