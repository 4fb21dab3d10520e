"""``python -m torchext.run``: scripts that know nothing of torchext."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPTS, Ended, run_workers, under_run
from torch import nn

import torchext
from torchext.run import UsageError, main, options_of, parse

PLAIN = str(SCRIPTS / "plain_ddp.py")
ATTACHED = ("plain", "closure", "accumulated", "validated first", "remade", "divided", "saved")
UNATTACHED = ("refused", "beside")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_workers([PLAIN], tmp_path_factory.mktemp("gloo")).results()


def run_on(backend: str, folder: Path, *words: str) -> Ended:
    return run_workers(["-m", "torchext.run", "--backend", backend, *words], folder)


@pytest.mark.parametrize("form", ["dear", "dear sharded"])
def test_dear_trains_as_gloo_does(form: str, reference: list[dict[str, Any]], tmp_path: Path) -> None:
    # In the sharded form rank 0 cannot ask for the optimizer's state alone.
    attached = [case for case in ATTACHED if form == "dear" or case != "saved"]
    cases = [*attached, *UNATTACHED]
    ended = run_workers([*under_run(form), "--option", "bucket_mb=0.001", PLAIN, ",".join(cases)], tmp_path)
    for rank, (expected, given) in enumerate(zip(reference, ended.results(), strict=True)):
        assert (expected["backend"], given["backend"]) == ("gloo", "dear")
        for case in cases:
            torch.testing.assert_close(given[case]["losses"], expected[case]["losses"], rtol=0, atol=1e-6)
            torch.testing.assert_close(given[case]["model"], expected[case]["model"], rtol=0, atol=1e-5)
            assert (given[case]["steps"] is not None) == (case in attached), (rank, case)
        assert given["plain"]["steps"] == 6
        assert given["closure"]["steps"] == 5  # the first was under way
        assert given["beside"]["group"] == expected["beside"]["group"] == "gloo"
        if form == "dear":
            assert given["saved"]["between"] == given["saved"]["behind"] == []
            assert given["saved"]["apart"] == given["saved"]["spread"] == 0.0
    lines = [line for line in ended.errors[0].splitlines() if line.startswith("torchext.run: ")]
    assert lines.count("torchext.run: attached Sequential with SGD to dear, 2 workers") == len(attached) - 2
    assert lines.count("torchext.run: attached Sequential with Adam to dear, 2 workers") == 1
    assert lines.count("torchext.run: attached Sequential with SGD and AdamW to dear, 2 workers") == 1
    assert (
        ended.errors[0].count("trains as plain DDP: torchext.attach: the optimizer owns 1 parameters that are not") == 1
    )
    assert "torchext" not in ended.errors[1]


@pytest.mark.parametrize("backend", ["prague", "dssync", "hop"])
def test_decentralized_workers_train(backend: str, reference: list[dict[str, Any]], tmp_path: Path) -> None:
    # A script that names a backend of torchext has that one.
    named, asked = ("dear", ["hop"]) if backend == "hop" else (backend, [])
    ended = run_on(named, tmp_path, PLAIN, "plain,closure,saved", *asked)
    for rank, (expected, given) in enumerate(zip(reference, ended.results(), strict=True)):
        assert given["backend"] == backend
        for case in ("plain", "closure"):
            assert given[case]["losses"][0] == pytest.approx(expected[case]["losses"][0], abs=1e-6)
            assert given[case]["losses"] != expected[case]["losses"]
            assert given[case]["steps"] == (6 if case == "plain" else 5)
        saved = given["saved"]
        assert saved["apart"] > 1e-3
        assert saved["distance"] < 1e-6
        assert saved["spread"] == 0.0
        assert saved["behind"] == []
        # Each once: rank 0's state_dict(), and on all ranks the evaluation.
        assert [message.partition(" between")[0] for message in saved["between"]] == [
            *(["torchext: state_dict()"] if rank == 0 else []),
            "torchext: an evaluation",
        ]
        assert all("torch.distributed.barrier() in front of it" in message for message in saved["between"])
        assert saved["steps"] == 6


@pytest.mark.parametrize("words", [["return"], ["exit", "3"], ["text"], ["raise"]], ids=lambda words: words[0])
def test_a_script_ends_as_under_python(words: list[str], tmp_path: Path) -> None:
    script = str(SCRIPTS / "ends.py")
    plain = run_workers([script, *words], tmp_path, 1, is_forked=False)
    command = ["-m", "torchext.run", "--backend=dear", script, *words, "--help"]
    ended = run_workers(command, tmp_path, 1, is_forked=False)
    assert ended.statuses == plain.statuses
    assert ended.outputs[0].replace(", '--help'", "") == plain.outputs[0]
    # Nothing was trained, which is told where the script did not end the process itself.
    said = "torchext.run: no DistributedDataParallel model over the default process group was trained; "
    said += "nothing was attached"
    expected = plain.errors[0] + (f"{said}\n" if words == ["return"] else "")
    assert re.sub(r"(?m)^\[rank0\]: ", "", ended.errors[0]) == re.sub(r"(?m)^\[rank0\]: ", "", expected)


def test_a_module_runs_and_a_missing_script_is_one_line(tmp_path: Path) -> None:
    ended = run_workers(["-m", "torchext.run", "--backend", "hop", "-m", "ends", "exit", "4"], tmp_path, 1)
    assert ended.statuses == [4]
    assert "['exit', '4'] __main__ False True" in ended.outputs[0]
    for words, status, said in (
        (["--backend", "dear", "missing.py"], 2, "can't open file"),
        (["--backend", "dear", "-m", "missing_module"], 1, "no module named 'missing_module'"),
    ):
        ended = run_workers(["-m", "torchext.run", *words], tmp_path, 1)
        assert ended.statuses == [status]
        assert said in ended.errors[0]
        assert len(ended.errors[0].splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "--backend is missing: allowed dear, dssync, hop, prague, torchext. usage: torchrun"),
        (["--backend", "dear", "--option", "form=both", "train.py"], "form"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr("sys.argv", ["torchext.run", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        text = capsys.readouterr().err
        assert text.count("\n") == lines
        assert said in text or not lines


def test_command_lines() -> None:
    assert parse(["--backend", "hop", "train.py", "--backend", "x"]) == ("hop", [], ["train.py", "--backend", "x"])
    taken = parse(["--option=a=1", "--backend=dear", "--option", "b=2", "-m", "pkg.train", "-h"])
    assert taken == ("dear", ["a=1", "b=2"], ["-m", "pkg.train", "-h"])
    for words, said in (
        (["--backend"], "--backend wants a value"),
        (["--backend", "gloo", "t.py"], "--backend gloo: allowed dear, dssync, hop, prague"),
        (["--backends", "dear", "t.py"], "no option --backends"),
        (["--backend", "dear"], "a script is missing"),
        (["--backend", "dear", "-m"], "a script is missing"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            parse(words)


def test_options_are_parsed_by_their_types() -> None:
    prague = options_of("prague", ["group_size=2", "order=atc", "shared_memory=false", "timeout=90.5"])
    assert (prague.group_size, prague.order, prague.shared_memory) == (2, "atc", False)
    assert prague.timeout == timedelta(seconds=90.5)
    assert options_of("dear", ["bucket_mb=2.5"]).bucket_mb == 2.5
    assert options_of("dear", ["bucket_mb=auto"]).bucket_mb == "auto"
    assert options_of("dssync", ["schedule=topology", "racks=[0,0,1,1]"]).racks == [0, 0, 1, 1]
    assert options_of("hop", ["neighbours=[[1],[0]]"]).neighbours == [[1], [0]]
    for backend, text, said in (
        ("prague", "group_size=two", "group_size wants a whole number"),
        ("prague", "shared_memory=2", "shared_memory wants true or false"),
        ("prague", "timeout=soon", "timeout wants seconds"),
        ("prague", "graph=ring", "PragueOptions: no option graph: allowed group_size, generator"),
        ("dear", "form", "write NAME=VALUE"),
        ("hop", "graph=star", "graph"),
        ("dssync", "racks=left", "racks wants a list"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            options_of(backend, [text])


def test_which_optimizer_is_found() -> None:
    from torchext.integrations.automatic import OptimizerNotFoundError, find_optimizers

    class Wrapped:  # what is read of a DDP model
        def __init__(self, module: nn.Module) -> None:
            self.module, self.parameters_to_ignore, self._delay_all_reduce_params = module, set(), []  # type: ignore[var-annotated]

    model: Any = Wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    whole, part = torch.optim.SGD(model.module.parameters()), torch.optim.Adam(model.module[1].parameters())
    other = torch.optim.SGD(model.module[0].parameters())
    assert find_optimizers(model, [part, whole]) == [whole]
    assert find_optimizers(model, [whole, whole]) == [whole]
    assert find_optimizers(model, [part, other]) == [part, other]
    model.module[0].requires_grad_(False)
    assert find_optimizers(model, [part]) == [part]
    for optimizers, said in (
        ([whole, part], "SGD and Adam have the same parameters (1.weight, 1.bias)"),
        ([], "no optimizer has the model's parameters"),
        ([torch.optim.SGD(model.module[0].parameters())], "no optimizer has the model's parameters"),
        (
            [torch.optim.SGD([model.module[1].weight])],
            "SGD does not have 1 of the model's trainable parameters (1.bias)",
        ),
    ):
        with pytest.raises(OptimizerNotFoundError, match=re.escape(said)):
            find_optimizers(model, optimizers)
    assert torchext.attach.__module__ == "torchext._attach"
