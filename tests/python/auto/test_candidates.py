"""Candidates are predicted offline, explained in words, and chosen only where they gain enough."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from auto_examples import growing_profile, ring_link

import torchext
from torchext.auto import Candidate, Profile, SyncPlan, simulate
from torchext.auto.__main__ import main
from torchext.auto.candidates import INEXACT, search


def by_name(candidates: list[Candidate]) -> dict[str, Candidate]:
    return {f"{candidate.way} {candidate.form}": candidate for candidate in candidates}


def some_plan(**options: Any) -> SyncPlan:
    profile, link = growing_profile(), ring_link()
    arguments: dict[str, Any] = {"listed": INEXACT, "allow": ("exact",)} | options
    return SyncPlan(profile, link, tuple(search(profile, link, **arguments)), arguments["allow"], "2.15.0", "0.2.0")


def test_dear_wins_where_the_link_is_the_bottleneck() -> None:
    found = simulate(growing_profile(), ring_link())
    assert [candidate.chosen for candidate in found] == [True, False, False, False]
    named = by_name(found)
    assert named["dear sharded"].step_seconds < named["ddp program"].step_seconds < named["ddp default"].step_seconds
    assert found[0].way == "dear"
    assert all(candidate.exact and candidate.possible for candidate in found)
    for candidate in found:
        assert candidate.step_seconds == pytest.approx(candidate.compute_seconds + candidate.exposed_seconds)
        assert sorted(p for bucket in candidate.buckets for p in bucket) == list(range(12))


def test_plain_ddp_stays_where_nothing_gains() -> None:
    fast = dataclasses.replace(ring_link(latency=1e-6, rate=1e12), copy_bytes_per_second=1e12)
    found = simulate(growing_profile(), fast)
    assert by_name(found)["ddp default"].chosen


def test_a_sharded_form_divides_the_optimizers_work() -> None:
    fast = dataclasses.replace(ring_link(latency=1e-6, rate=1e12), copy_bytes_per_second=1e9)
    named = by_name(simulate(growing_profile(megabytes=40), fast))
    # Two reads and a write of 40 MB, where a copy of 1 GB/s is a read and a write: 60 ms, or 15 for each of 4 ranks.
    saved = named["dear replicated"].step_seconds - named["dear sharded"].step_seconds
    assert saved == pytest.approx(0.045, rel=0.02)


def test_copies_that_were_not_measured_are_free() -> None:
    unknown = dataclasses.replace(ring_link(latency=1e-6, rate=1e12), copy_bytes_per_second=0.0)
    assert simulate(growing_profile(compute=0.3), unknown)[0].step_seconds == pytest.approx(0.3, rel=0.01)


def test_noise_widens_the_gate() -> None:
    found = simulate(growing_profile(), ring_link(spread=5.0))
    assert by_name(found)["ddp default"].chosen
    assert "less than 3 % faster than the reference, were that one's all-reduce 500 % faster" in found[0].reason


def test_inexact_ways_stand_beside_and_are_never_chosen_by_time() -> None:
    found = by_name(simulate(growing_profile(), ring_link(), allow=["prague", "hop"]))
    assert found["prague cta"].rho == pytest.approx(1 / 3)
    assert found["hop parallel"].rho == pytest.approx(0.0, abs=1e-9)  # of 4 ranks each has all others for neighbours
    assert not found["prague cta"].chosen
    assert "dssync cta" not in found


def test_an_inexact_way_is_chosen_by_name() -> None:
    plan = some_plan(allow=("exact", "prague"), choose="prague")
    assert plan.chosen is not None
    assert (plan.chosen.way, plan.chosen.exact) == ("prague", False)


def test_a_thousand_ranks_are_simulated_offline() -> None:
    begin = time.perf_counter()
    found = simulate(growing_profile(), ring_link(), world_size=1024)
    assert (
        by_name(found)["ddp default"].step_seconds
        > by_name(simulate(growing_profile(), ring_link()))["ddp default"].step_seconds
    )
    assert time.perf_counter() - begin < 10


def test_explain_says_what_was_measured_and_why_each_lost() -> None:
    text = some_plan().explain()
    lines = text.splitlines()
    assert lines[0].startswith(
        "4 ranks on 4 hosts, links of 125 MB/s (gloo), 1 ms a hop; compute 302 ms a step, 40.0 MB"
    )
    assert "calibration repeats within 0 %" in lines[0]
    assert lines[1].split() == ["predicted", "exposed", "way", "exact", "why", "not"]
    assert sum("chosen" in line for line in lines) == 1
    assert any("DDP, default buckets" in line and "slower; the reference" in line for line in lines)
    assert any("prague, groups of 2" in line and "rho 0.333; not allowed (allow=...)" in line for line in lines)


def with_wide_layer(rows: int) -> Profile:
    """The last layer's weight is 2048 x 2048, and has a bias."""
    profile = growing_profile(compute=0.03, megabytes=4.0)
    first = profile.parameters[0]
    weight = dataclasses.replace(
        first, name="head.weight", shape=(2048, 2048), nbytes=4 * 2048 * 2048, kind="linear", rows=rows
    )
    bias = dataclasses.replace(first, name="head.bias", shape=(2048,), nbytes=4 * 2048)
    return dataclasses.replace(profile, parameters=(weight, bias, *profile.parameters[1:]))


def test_a_wide_layer_with_few_rows_sends_these() -> None:
    # Without copies the optimizer's work counts nothing, by which the two forms differ.
    profile, link = with_wide_layer(16), dataclasses.replace(ring_link(rate=25e6), copy_bytes_per_second=0.0)
    plan = SyncPlan(profile, link, tuple(simulate(profile, link)), ("exact",), "2.15.0", "0.2.0")
    assert plan.chosen is not None
    assert plan.chosen.factor_layers == ("head",)
    with_rows = {f"{c.way} {c.form}": c for c in plan.candidates if c.factor_layers}
    assert sorted(with_rows) == ["ddp program", "dear replicated", "dear sharded"]
    for candidate in with_rows.values():
        assert candidate.possible
        assert sorted(p for bucket in candidate.buckets for p in bucket) == list(range(2, 13))
    # The layer is gathered in neither form.
    assert with_rows["dear sharded"].step_seconds == with_rows["dear replicated"].step_seconds
    text = plan.explain()
    for way in ("DDP", "dear, replicated", "dear, sharded"):
        assert f"{way}, 1 layer as rows, " in text


def test_a_table_with_few_indices_sends_rows() -> None:
    profile = with_wide_layer(16)
    table = dataclasses.replace(
        profile.parameters[0], name="words.weight", shape=(50257, 256), nbytes=4 * 50257 * 256, kind="embedding"
    )
    few = dataclasses.replace(profile, parameters=(table, *profile.parameters[2:]))
    plan = SyncPlan(
        few, ring_link(rate=25e6), tuple(simulate(few, ring_link(rate=25e6))), ("exact",), "2.15.0", "0.2.0"
    )
    assert plan.chosen is not None
    assert plan.chosen.factor_layers == ("words",)
    assert "DDP, 1 layer as rows, " in plan.explain()
    many = dataclasses.replace(few, parameters=(dataclasses.replace(table, rows=30_000), *few.parameters[1:]))
    assert not any(candidate.factor_layers for candidate in simulate(many, ring_link(rate=25e6)))


def test_rows_beside_dear_are_chosen_where_other_layers_are_deep() -> None:
    profile = growing_profile(layers=54)
    first = profile.parameters[0]
    wide = dataclasses.replace(first, name="head.weight", shape=(2048, 2048), nbytes=4 << 22, kind="linear", rows=16)
    profile = dataclasses.replace(profile, parameters=(wide, *profile.parameters[1:]))
    found = simulate(profile, ring_link())
    assert (found[0].way, found[0].factor_layers, found[0].chosen) == ("dear", ("head",), True)
    others = [c.step_seconds for c in found if c.way == "ddp" or not c.factor_layers]
    assert found[0].step_seconds * 1.05 < min(others)


def test_layers_that_do_not_send_rows() -> None:
    for found, reason in (
        (simulate(with_wide_layer(2000), ring_link()), "no layer has few enough rows"),
        (
            search(with_wide_layer(16), ring_link(), listed=(), allow=("exact",), without_rows=("head",)),
            "no layer has few enough rows",
        ),
        (
            search(with_wide_layer(16), ring_link(), listed=(), allow=("exact",), refused={"factors": "shared"}),
            "shared",
        ),
    ):
        assert not any(candidate.factor_layers for candidate in found)
        (why,) = (candidate for candidate in found if candidate.way == "factors")
        assert (why.possible, why.reason) == (False, reason)


def test_a_way_that_cannot_be_is_listed_with_the_reason() -> None:
    plan = some_plan(refused={"dear": "not possible: 'emb' has sparse gradients"})
    line = next(line for line in plan.explain().splitlines() if "dear, sharded" in line)
    assert line.split()[:2] == ["-", "-"]
    assert line.endswith("not possible: 'emb' has sparse gradients")


def test_files_keep_profile_and_plan(tmp_path: Path) -> None:
    growing_profile().save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == growing_profile()
    some_plan().save(tmp_path / "plan.json")
    assert SyncPlan.load(tmp_path / "plan.json") == some_plan()


def test_a_plan_of_one_rank_has_nothing_to_synchronise(tmp_path: Path) -> None:
    plan = SyncPlan(growing_profile(), None, (), ("exact",), "2.15.0", "0.2.0")
    assert plan.explain() == "1 rank: nothing to synchronise"
    assert plan.chosen is None
    plan.save(tmp_path / "plan.json")
    assert SyncPlan.load(tmp_path / "plan.json") == plan
    with pytest.raises(ValueError, match="one rank has nothing to synchronise"):
        plan.timeline(tmp_path / "plan.png")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda p, k: simulate(k, k), TypeError, "takes a torchext.auto.Profile, got LinkModel"),
        (lambda p, k: simulate(p, p), TypeError, "takes a torchext.auto.LinkModel, got Profile"),
        (lambda p, k: simulate(p, k, world_size=1), ValueError, "whole number from 2 to 4096, got 1"),
        (lambda p, k: simulate(p, k, world_size=5000), ValueError, "whole number from 2 to 4096, got 5000"),
        (lambda p, k: simulate(p, k, allow=["prage"]), ValueError, "got 'prage'; did you mean 'prague'"),
    ],
)
def test_bad_arguments_of_simulate(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(growing_profile(), ring_link())


def test_commands_explain_and_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some_plan().save(tmp_path / "plan.json")
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == some_plan().explain() + "\n"
    growing_profile().save(tmp_path / "p.json")
    ring_link().save(tmp_path / "l.json")
    words = ["simulate", "--profile", str(tmp_path / "p.json"), "--link", str(tmp_path / "l.json")]
    assert main([*words, "--world", "64", "--rate", "1.25e9", "--allow", "prague"]) == 0
    out = capsys.readouterr().out
    assert "DDP, default buckets" in out
    assert "prague, groups of 4" in out
    assert main([*words, "--world", "1"]) == 1
    assert "world_size must be" in capsys.readouterr().err


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from torchext.auto.plots import draw_link

    some_plan().timeline(tmp_path / "plan.png")
    draw_link(tmp_path / "link.svg", ring_link())
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert (tmp_path / "link.svg").stat().st_size > 1000


def test_it_is_there_without_an_import_of_its_own() -> None:
    assert torchext.auto.simulate is simulate
