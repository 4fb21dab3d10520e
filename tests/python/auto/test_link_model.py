"""LinkModel answers what operations take, on the network that was measured and on others; JSON keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from auto_examples import SIZES, ring_link

from torchext.auto import LinkModel, OperationTable


def test_the_table_is_exact_at_its_points_and_linear_between() -> None:
    table = OperationTable(((1000, 0.001), (2000, 0.003), (4000, 0.004)))
    assert [table.seconds(nbytes) for nbytes in (1000, 1500, 2000, 3000, 6000)] == pytest.approx(
        [0.001, 0.002, 0.003, 0.0035, 0.005]
    )


def test_the_line_of_a_link_is_found_again() -> None:
    alpha, beta = ring_link().tables["p2p"].line
    assert (alpha, 1 / beta) == pytest.approx((1e-3, 125e6))
    assert ring_link().tables["p2p"].line_error < 1e-6


def test_another_rate_and_latency_are_those_of_the_formula() -> None:
    fast = ring_link().scaled(rate=1.25e9, latency=1e-4)
    expected = ring_link(latency=1e-4, rate=1.25e9)
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        for size in SIZES:
            assert fast.seconds(operation, size) == pytest.approx(expected.seconds(operation, size))
    assert not any(table.measured for table in fast.tables.values())
    assert ring_link().scaled().seconds("all_reduce", 1 << 20) == pytest.approx(
        ring_link().seconds("all_reduce", 1 << 20)
    )


@pytest.mark.parametrize("ranks", [2, 64, 1024])
def test_another_world_size_is_that_of_the_formula(ranks: int) -> None:
    other = ring_link().with_ranks(ranks)
    assert other.world_size == other.hosts == ranks
    assert other.seconds("all_reduce", 1 << 20) == pytest.approx(ring_link(ranks).seconds("all_reduce", 1 << 20))


def test_the_spread_is_that_of_the_noisiest_operation() -> None:
    assert ring_link(spread=0.04).spread == 0.04
    assert "repeats within 4 %" in ring_link(spread=0.04).report()


def test_a_file_keeps_it(tmp_path: Path) -> None:
    ring_link().save(tmp_path / "link.json")
    assert LinkModel.load(tmp_path / "link.json") == ring_link()


def changed(path: Path, change: Any) -> Path:
    ring_link().save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.update(latency_seconds=float("nan")),
            "latency_seconds must be a finite number, 0 or more, got nan",
        ),
        (lambda d: d.update(copy_bytes_per_second=-1), "copy_bytes_per_second must be a finite number"),
        (
            lambda d: d["tables"]["p2p"]["points"][2].__setitem__(1, -0.5),
            r"tables.p2p.points\[2\]\[1\] must be a finite",
        ),
        (lambda d: d["tables"]["p2p"]["points"].reverse(), "link.json: "),
        (lambda d: d.update(speed=3), "unknown key 'speed'; allowed here: backend, device"),
        (lambda d: d["tables"]["p2p"].update(speed=3), "unknown key 'tables.p2p.speed'"),
        (lambda d: d.pop("host_of"), "the key 'host_of' is missing"),
        (lambda d: d.update(version=2), "version must be 1, got 2"),
        (lambda d: d.update(format="torchext.auto.Profile"), "format must be 'torchext.auto.LinkModel'"),
        (lambda d: d.update(backend=3), "backend must be a text, got 3"),
        (lambda d: d.update(host_of=[0]), "2 or more ranks, got 1"),
        (lambda d: d["tables"].pop("all_reduce"), "tables must have 'all_reduce'"),
    ],
)
def test_a_file_that_is_wrong_names_the_key(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinkModel.load(changed(tmp_path / "link.json", change))


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        LinkModel.load(tmp_path / "link.json")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda link: link.scaled(rate=0), "rate must be above 0"),
        (lambda link: link.scaled(latency=-1), "latency must be finite and 0 or more, got -1"),
        (lambda link: link.scaled(latency=float("inf")), "latency must be finite"),
        (lambda link: link.with_ranks(1), "world_size must be a whole number from 2 on, got 1"),
        (lambda link: link.seconds("broadcast", 1), "operation must be one of all_reduce, .*, got 'broadcast'"),
    ],
)
def test_numbers_out_of_range_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ring_link())
