"""The benchmark lab itself: emulated compute, stragglers, results. No bound on time is tight: machines are busy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab_benchmarks import BENCHMARKS, cli, emulated, results, stragglers, training

# --- emulated compute --------------------------------------------------------------------------------------------


def small_model(forward_ms: float = 0.0, backward_ms: float = 0.0) -> emulated.EmulatedModel:
    return emulated.EmulatedModel(layers=3, parameter_bytes=4000, forward_ms=forward_ms, backward_ms=backward_ms)


def test_a_step_takes_the_time_it_should() -> None:
    overhead = emulated.measure_overhead(small_model(20.0, 40.0), steps=5)
    assert 59.0 < overhead.step_ms < 400.0
    assert overhead.target_ms == 60.0


def test_a_straggler_takes_its_factor() -> None:
    model = small_model(10.0, 10.0)
    model.clock.factor = 3.0
    assert emulated.measure_overhead(model, steps=3).step_ms > 59.0


def test_gradients_flow_and_a_step_moves_the_parameters() -> None:
    model = small_model()
    model.set_gradient(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
    assert sum(weight.numel() for weight in model.parameters()) == 1000
    for weight in model.parameters():
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, -0.15).detach())


def test_gradients_accumulate() -> None:
    model = small_model()
    for _ in range(4):
        model(torch.zeros(1)).sum().backward()
    for weight in model.parameters():
        assert weight.grad is not None
        assert (weight.grad == 4).all()


def test_a_gradient_that_was_written_into_is_whole_again() -> None:
    model = small_model()
    for _ in range(3):
        model.zero_grad()
        model(torch.zeros(1)).sum().backward()
        for weight in model.parameters():
            assert weight.grad is not None
            assert (weight.grad == 1).all()
            weight.grad.fill_(7)  # as DDP does with its average


@pytest.mark.parametrize("growth", [0.0, 1.0, 5.0])
def test_layer_sizes_add_up(growth: float) -> None:
    sizes = emulated.layer_sizes(7, 100_003, growth)
    assert sum(sizes) == 100_003
    assert sizes[-1] / sizes[0] == pytest.approx(1 + growth, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "parameters", "normalization"),
    [(50, 25_557_032, 53_120), (101, 44_549_160, 105_344), (152, 60_192_808, 151_424)],
)
def test_sizes_of_resnets(layers: int, parameters: int, normalization: int) -> None:
    """torchvision's have so many parameters, those of batch normalization among them, and 1000 biases."""
    sizes = emulated.resnet_sizes(layers)
    assert len(sizes) == layers + 4
    assert sum(sizes) == parameters - normalization - 1_000


def test_sizes_are_proportions() -> None:
    sizes = emulated.resnet_sizes(50)
    scaled = emulated.layer_sizes(54, 10_000_000, 0.0, sizes)
    assert sum(scaled) == 10_000_000
    assert scaled[-1] / 10_000_000 == pytest.approx(2_048_000 / sum(sizes), rel=1e-4)
    with pytest.raises(ValueError, match="sizes must be 53 numbers"):
        emulated.EmulatedModel(layers=53, parameter_bytes=4000, forward_ms=1, backward_ms=1, sizes=sizes)


def test_bad_models_are_refused() -> None:
    with pytest.raises(ValueError, match="layers=0"):
        emulated.EmulatedModel(layers=0, parameter_bytes=4, forward_ms=1, backward_ms=1)


# --- stragglers --------------------------------------------------------------------------------------------------


def test_one_straggler() -> None:
    pattern = stragglers.parse("one:5", 8)
    assert [pattern.factor(rank, 3) for rank in range(8)] == [1.0] * 7 + [5.0]


def test_random_stragglers_have_the_right_share_and_repeat() -> None:
    pattern = stragglers.parse("random:6", 8, seed=3)
    factors = [[pattern.factor(rank, step) for step in range(4000)] for rank in range(8)]
    assert {factor for row in factors for factor in row} == {1.0, 6.0}
    for row in factors:  # exact numbers, not luck: the pattern is a function of the seed
        assert sum(factor == 6.0 for factor in row) / len(row) == pytest.approx(1 / 8, abs=0.02)
    assert factors[0] != factors[1]
    again = stragglers.parse("random:6", 8, seed=3)
    assert factors[5] == [again.factor(5, step) for step in range(4000)]
    other = stragglers.parse("random:6", 8, seed=4)
    assert factors[5] != [other.factor(5, step) for step in range(4000)]


@pytest.mark.parametrize("text", ["", "two:5", "one", "one:x", "one:0.5", "random"])
def test_bad_patterns(text: str) -> None:
    with pytest.raises(ValueError, match="stragglers"):
        stragglers.parse(text, 4)


# --- results -----------------------------------------------------------------------------------------------------


def test_the_command_of_a_result_names_the_script_in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    script = BENCHMARKS / "hop" / "hop_straggler.py"
    monkeypatch.setattr("sys.argv", [str(script), "--repeats", "3", "--results", "elsewhere"])
    assert cli.script_line() == "python benchmarks/hop/hop_straggler.py --repeats 3"


def test_ratios_are_paired() -> None:
    ratio = results.paired_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert ratio.values == (2.0, 3.0, 1.0)
    assert (ratio.median, min(ratio.values), max(ratio.values)) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="paired"):
        results.paired_ratio([1.0], [1.0, 2.0])


def test_contenders_run_in_turn() -> None:
    order: list[str] = []
    values = results.in_turn({name: (lambda name=name: order.append(name)) for name in "AB"}, 3)
    assert order == ["A", "B"] * 3
    assert {name: len(got) for name, got in values.items()} == {"A": 3, "B": 3}


def test_nothing_is_timed_unchecked() -> None:
    checks = results.Checks()
    with pytest.raises(results.UncheckedError, match="without a check"):
        checks.require("ours")
    for error in (0.2, float("nan")):
        with pytest.raises(results.UncheckedError, match="wrong"):
            checks.confirm("ours", error, 0.1)
    checks.confirm("ours", 0.05, 0.1)
    checks.require("ours")


@pytest.mark.parametrize(("higher_is_better", "ratio"), [(True, 2.0), (False, 0.5)])
def test_a_report_is_written(tmp_path: Path, higher_is_better: bool, ratio: float) -> None:
    report = results.Report(
        "name", script="python x.py", unit="ms", reference="a", higher_is_better=higher_is_better, conditions={"n": 2}
    )
    figures = {"a": [1.0, 2.0], "b": [2.0, 4.0]}
    good = {"error": 0.0, "tolerance": 0.1}
    with pytest.raises(results.UncheckedError, match="no check of b"):
        report.add("case", figures, checks={"a": good})
    report.add("case", figures, checks={"a": good, "b": good}, target=1.5)
    path = report.write(tmp_path)
    written = json.loads(path.read_text())
    assert written["cases"][0]["ratios"]["b"]["values"] == [ratio, ratio]
    assert {"cpu", "cores", "torch", "date", "load_average", "commit"} <= written["machine"].keys()
    assert (tmp_path / "name.png").stat().st_size > 1000


def test_progress_counts_parts_of_a_step() -> None:
    ends = [10.0, 11.0, 13.0]
    assert [training.progress(ends, moment) for moment in (10.0, 10.5, 11.0, 12.0, 13.0)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    with pytest.raises(ValueError, match="outside"):
        training.progress(ends, 14.0)
