"""The parts of the lab that train: contenders, their check, bounds, the search for the best, timelines, the sweep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lab import bounds, contenders, language, launch, netlab, plot, results, timeline, training, tuning  # noqa: E402

needs_namespaces = pytest.mark.skipif(netlab.missing() is not None, reason=f"no namespaces: {netlab.missing()}")


# --- contenders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "way", "bucket_mb"),
    [
        ("ddp", "ddp", contenders.Training, None),
        ("ddp:4", "ddp 4", contenders.Training, 4.0),
        ("zero", "zero", contenders.ZeroTraining, None),
        ("fsdp2:0.5", "fsdp2 0.5", contenders.FSDP2Training, 0.5),
    ],
)
def test_contenders_over_gloo(text: str, name: str, way: type[contenders.Training], bucket_mb: float | None) -> None:
    got = contenders.contender(text, group_size=3)
    assert (got.name, got.way, got.bucket_mb, got.backend) == (name, way, bucket_mb, "gloo")
    assert got.lockstep
    assert not got.tunes
    assert got.pg_options() is None


def test_contenders_of_torchext() -> None:
    prague = contenders.contender("prague:smart", group_size=3)
    assert prague.options == {"group_size": 3, "generator": "smart", "order": "cta"}
    assert not prague.lockstep
    auto = contenders.contender("dear:sharded", allreduce_fallback=False)
    assert auto.options == {"form": "sharded", "bucket_mb": "auto", "allreduce_fallback": False}
    assert auto.lockstep
    assert auto.tunes
    fixed = contenders.contender("dear:replicated/2")
    assert (fixed.name, fixed.options) == ("dear replicated/2", {"form": "replicated", "bucket_mb": 2.0})
    assert fixed.tunes  # whether a plain all-reduce is faster
    assert fixed.without_fallback().options == {**fixed.options, "allreduce_fallback": False}
    assert prague.without_fallback() == prague
    shuffled = contenders.contender("dssync:topology/cta", group_size=2)
    assert shuffled.options == {"group_size": 2, "schedule": "topology", "order": "cta"}
    assert shuffled.lockstep
    assert shuffled.most_ahead > fixed.most_ahead == 2
    hop = contenders.contender("hop:backup=1,max_ig=4+max_jump=10+order=serial")
    assert hop.options == {"backup_workers": 1, "max_iteration_gap": 4, "max_jump": 10, "order": "serial"}
    assert not hop.lockstep and not hop.tunes and not hop.keeps_the_mean
    assert contenders.contender("hop").options == {} and contenders.contender("hop:max_ig=2").keeps_the_mean


@pytest.mark.parametrize("text", ["", "dpp", "ddp:big", "zero:overlap", "hop:backup", "hop:=1"])
def test_bad_contenders(text: str) -> None:
    with pytest.raises(ValueError, match="contenders"):
        contenders.contender(text)


def test_layers_are_grouped_by_size() -> None:
    layers: list[nn.Module] = [nn.Linear(256, 1024, bias=False) for _ in range(5)]  # 1 MiB each
    assert [len(group) for group in contenders.grouped(layers, None)] == [1] * 5
    assert [len(group) for group in contenders.grouped(layers, 2)] == [2, 2, 1]
    assert [len(group) for group in contenders.grouped(layers, 100)] == [5]


@pytest.mark.parametrize("text", ["zero", "fsdp2:0.01"])
def test_a_window_of_another_way_counts_and_checks(text: str) -> None:
    settings = {
        "contenders": [text],
        "options": {},
        "workload": {"layers": 3, "parameter_bytes": 36_000, "forward_ms": 3.0, "backward_ms": 6.0, "growth": 2.0},
        "stragglers": "none",
        "seed": 0,
        "repeats": 1,
        "warmup_s": 0.1,
        "window_s": 0.4,
        "check_steps": 2,
    }
    got = launch.launch("lab.training:ranks", ranks=2, settings=settings, deadline_s=200)
    name = contenders.contender(text).name
    assert 1 < training.gradients_per_second(got, 0.4)[name][0] <= 2 / 0.009
    assert got[0]["checks"][name]["error"] < 1e-4


# --- the right answer --------------------------------------------------------------------------------------------

REFERENCE_RANKS = """
import functools
import torch
from lab import contenders, reference

MAKE = functools.partial(torch.optim.Adam, lr=0.01)

def loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return (model.body(torch.randn(4, 6, generator=generator)) ** 2).mean()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))

    def forward(self, rank, step):
        return loss(self, rank, step)

def distances(rank):
    start = [weight.detach().clone() for weight in Model().parameters()]
    expected = reference.train_alone(Model(), MAKE, loss, world_size=rank.world_size, steps=3)
    found = {}
    for text in ("ddp", "zero", "fsdp2"):
        with rank.process_group("gloo"):
            training = contenders.contender(text).prepare(Model(), MAKE)
            for step in range(3):
                training.optimizer.zero_grad()
                training.model(rank.rank, step).backward()
                training.optimizer.step()
            found[text] = reference.distance(training, start, expected)
            with torch.no_grad():
                next(training.module.parameters()).mul_(1.5)
            found[text + " wrong"] = reference.distance(training, start, expected)
    return found
"""


def test_every_way_reaches_what_one_process_reaches(tmp_path: Path) -> None:
    (tmp_path / "reference_ranks.py").write_text(REFERENCE_RANKS)
    for found in launch.launch("reference_ranks:distances", ranks=2, deadline_s=200, folder=tmp_path):
        for text, apart in found.items():
            assert (apart > 0.1) if text.endswith("wrong") else (apart < 1e-4), (text, apart)


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
    from lab.emulated import EmulatedModel

    model = EmulatedModel(layers=2, parameter_bytes=800, forward_ms=0.0, backward_ms=0.0)
    model.annotate()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.zeros(1)).sum().backward()
    assert {"forward 0", "forward 1", "backward 0", "backward 1"} <= {one.key for one in profiler.key_averages()}


# --- the sweep and its map ---------------------------------------------------------------------------------------


def test_the_sweep_fits_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    import dear_sweep

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


@needs_namespaces
def test_links_without_a_limit() -> None:
    with netlab.NetLab(2, rate=None) as lab:
        assert lab.measure_rate(seconds=0.3, skip_s=0.1) > 1e8
        assert lab.describe()["rate"] is None


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
