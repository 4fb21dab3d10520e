"""What the lab makes of trainings: bounds, the search for the best, timelines, the sweep; and its language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lab_benchmarks import bounds, contenders, language, plot, results, timeline, tuning

# --- bounds ------------------------------------------------------------------------------------------------------


def test_bounds_of_a_gigabit() -> None:
    half = bounds.reduce_scatter_ms(4, 40e6, 1e9)
    assert half == pytest.approx(240.0)
    assert bounds.dear_step_ms(100, 200, half) == pytest.approx(480.0)
    assert bounds.ddp_step_ms(100, 200, half) == pytest.approx(580.0)


def test_a_pipeline_of_layers_waits_for_the_last_layer_both_ways() -> None:
    # 20 layers, 5 ms forward and 10 ms backward each; the link is busy but for the last layer's two passes.
    halves = [12.0] * 20
    assert bounds.dear_pipeline_ms(100, 200, halves) == pytest.approx(240 + 240 + 5 + 10)
    assert bounds.ddp_pipeline_ms(100, 200, halves) == pytest.approx(100 + 10 + 480)
    # Next to no communication: compute, and what the first layer sends after the backward and waits for.
    assert bounds.dear_pipeline_ms(100, 200, [0.5] * 20) == pytest.approx(300 + 0.5 + 0.5)
    assert bounds.ddp_pipeline_ms(100, 200, [0.5] * 20) == pytest.approx(300 + 1.0)
    # One layer hides nothing.
    assert bounds.dear_pipeline_ms(100, 200, [240.0]) == bounds.ddp_pipeline_ms(100, 200, [240.0]) == 780.0


def test_without_communication_the_bounds_are_the_compute() -> None:
    assert bounds.reduce_scatter_ms(1, 40e6, 1e9) == 0.0
    assert bounds.dear_step_ms(100, 200, 0.0) == bounds.ddp_step_ms(100, 200, 0.0) == 300.0
    with pytest.raises(ValueError, match="bounds"):
        bounds.reduce_scatter_ms(4, 40e6, 0.0)


# --- the best variant --------------------------------------------------------------------------------------------


def test_the_best_is_found_and_named() -> None:
    asked: list[str] = []

    def measure(texts: list[str]) -> dict[str, float]:
        asked.extend(texts)
        return {contenders.contender(text).name: 10.0 - abs(index - 2) for index, text in enumerate(texts)}

    texts, chosen = tuning.resolve(["ddp", "ddp:best", "zero"], measure)
    assert asked == tuning.GRIDS["ddp:best"]
    assert texts == ["ddp", "ddp:4", "zero"]
    assert chosen["ddp:best"]["best"] == "ddp:4"
    assert chosen["ddp:best"]["probed"]["ddp:1"] == 8.0


def test_nothing_is_probed_for_nothing() -> None:
    def measure(texts: list[str]) -> dict[str, float]:
        raise AssertionError(texts)

    assert tuning.resolve(["ddp", "zero"], measure) == (["ddp", "zero"], {})


# --- timelines ---------------------------------------------------------------------------------------------------


def event(name: str, begin_ms: float, end_ms: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "tid": 1, "ts": 1e6 + begin_ms * 1e3, "dur": (end_ms - begin_ms) * 1e3}


def test_a_timeline_is_trimmed_and_its_overlap_counted(tmp_path: Path) -> None:
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            *(event(f"step {index}", 100 * index, 100 * index + 100) for index in range(3)),
            event("forward 0", 10, 20),  # in step 0: not kept
            event("aten::add", 100, 110),
            event("forward 0", 100, 120),
            event("forward 1", 120, 140),
            event("backward 1", 140, 200),
            event("torchext::dear::all_gather", 90, 130),  # begun before step 1
            event("torchext::dear::reduce_scatter", 160, 180),
            event("torchext::dear::reduce_scatter", 170, 220),
        ]
    }
    events = timeline.trim(trace, 1, 1)
    assert [one["name"] for one in events].count("forward 0") == 1
    assert all(one["name"] != "aten::add" for one in events)
    assert timeline.spans(events, ("forward ",)) == [(0.0, 40.0)]
    found = timeline.overlap(events)
    assert found["reduce-scatter ms"] == 60.0
    assert found["share of reduce-scatter under backward"] == pytest.approx(40 / 60)
    assert found["share of all-gather under forward"] == pytest.approx(30 / 40)
    assert "all-reduce ms" not in found
    timeline.draw({"dear": events, "again": events}, tmp_path / "x.png", title="title")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_annotated_layers_are_seen_by_the_profiler() -> None:
    from lab.workloads.emulated import EmulatedModel

    model = EmulatedModel(layers=2, parameter_bytes=800, forward_ms=0.0, backward_ms=0.0)
    model.annotate()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.zeros(1)).sum().backward()
    assert {"forward 0", "forward 1", "backward 0", "backward 1"} <= {one.key for one in profiler.key_averages()}


# --- the sweep and its map ---------------------------------------------------------------------------------------


def test_the_sweep_fits_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    from dear import dear_sweep

    args = argparse.Namespace(
        rates="100mbit,300mbit,1gbit,3gbit,none", sizes="1,10,40,100", hosts=4, repeats=2, minutes=25.0
    )
    cells = dear_sweep.plans(args, 2)
    assert sum(cell.seconds(2) for row in cells.values() for cell in row) < 25 * 60
    slow, fast = cells["100mbit"][-1], cells["none"][0]
    assert (slow.repeats, fast.repeats) == (1, 2)
    assert slow.window_s >= 2 * slow.step_s
    assert "of 25 minutes" in capsys.readouterr().out


def test_a_map_is_drawn_with_holes(tmp_path: Path) -> None:
    report = results.Report("name", script="python x.py", unit="1/s", reference="a")
    good = {"error": 0.0, "tolerance": 0.1}
    for case in ("1gbit, 1 MB", "no limit, 2 MB"):
        report.add(case, {"a": [1.0, 2.0], "b": [2.0, 3.0]}, checks={"a": good, "b": good})

    def picture(drawn: results.Report, path: Path) -> None:
        plot.draw_map(drawn, path, rows=["1gbit", "no limit"], columns=["1 MB", "2 MB"], challenger="b")

    report.write(tmp_path, picture=picture)
    assert (tmp_path / "name.png").stat().st_size > 1000

    again = results.Report("name", script="python x.py", unit="1/s", reference="a")
    for case in ("3gbit, 1 MB", "no limit, 2 MB"):
        again.add(case, {"a": [1.0], "b": [5.0]}, checks={"a": good, "b": good})
    again.keep(tmp_path / "name.json")
    assert [case.name for case in again.cases] == ["1gbit, 1 MB", "no limit, 2 MB", "3gbit, 1 MB"]
    assert [case.ratios["b"].median for case in again.cases] == [1.75, 5.0, 5.0]
    assert again.cases[0].figures["a"].values == (1.0, 2.0)
    assert [case.machine for case in again.cases] == [report.machine, None, None]  # of another run, and of this one
    assert ["machine" in case for case in again.as_json()["cases"]] == [True, False, False]


# --- the language model ------------------------------------------------------------------------------------------


def test_batches_depend_on_seed_rank_and_step_alone() -> None:
    one = language.batch(0, 1, 2, samples=3, length=8)
    assert one.shape == (3, 9)
    assert torch.equal(one, language.batch(0, 1, 2, samples=3, length=8))
    for other in ((1, 1, 2), (0, 0, 2), (0, 1, 3)):
        assert not torch.equal(one, language.batch(*other, samples=3, length=8))


def test_the_language_model_learns_and_sees_no_future() -> None:
    torch.manual_seed(0)
    model = language.LanguageModel(layers=1, width=16, heads=2, length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    symbols = language.batch(0, 0, 0, samples=4, length=8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(symbols)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    block = model.body[0]
    hidden = torch.randn(1, 8, 16)
    changed = hidden.clone()
    changed[0, 5:] += 1.0
    torch.testing.assert_close(block(hidden)[0, :5], block(changed)[0, :5])
