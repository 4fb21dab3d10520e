"""tools/result_tables.py: the tables of small results, and that those of docs/results.md are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tools; at the end, so that torchext stays the installed one

from tools.result_tables import PAGE, number, render, rewrite, without_table  # noqa: E402

MACHINE = {"cpu": "A CPU", "cores": 2, "torch": "2.15.0", "commit": "abc1234", "date": "2026-11-01T00:00:00"}


def spread(*values: float) -> dict[str, object]:
    return {"values": list(values)}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    figures = {"ddp": spread(10, 20, 10), "dear": spread(20, 30, 40), "zero": spread(5, 5, 5)}
    cases = [{"case": "four hosts", "figures": figures, "target": 1.25}]
    file = {"script": "python benchmarks/one.py --x", "unit": "steps/s", "reference": "ddp", "higher_is_better": True}
    (tmp_path / "one.json").write_text(json.dumps({**file, "machine": MACHINE, "cases": cases}))
    return tmp_path


def test_the_page_of_this_tree() -> None:
    assert rewrite(PAGE.read_text()) == PAGE.read_text()
    assert without_table(PAGE.read_text()) == []


def test_a_table_has_machine_commit_contender_and_spread(results: Path) -> None:
    assert render("one | contenders: dear", results).splitlines() == [
        "",
        "| case | `ddp`, steps/s | `dear`, over it | asked for |",
        "| --- | --- | --- | --- |",
        "| four hosts | 10.0 | 2.00 [1.50, 4.00] | 1.25 |",
        "",
        "`one.py`, A CPU, 2 cores, torch 2.15.0, 2026-11-01, commit abc1234.",
    ]


def test_rows_times_and_another_reference(results: Path) -> None:
    rows = render("one | rows", results).splitlines()
    assert "| four hosts | `dear` | 30.0 [20.0, 40.0] | 2.00 [1.50, 4.00] | 1.25 |" in rows
    assert "| four hosts | `zero` | 5.00 [5.00, 5.00] | 0.500 [0.250, 0.500] |  |" in rows
    assert "| four hosts | 5.00 | 6.00 [4.00, 8.00] |" in render("one | over: zero | contenders: dear", results)


def test_what_a_marker_gets_wrong(results: Path) -> None:
    with pytest.raises(SystemExit, match="no contender prague"):
        render("one | contenders: prague", results)
    with pytest.raises(SystemExit, match="options that there are not: column"):
        render("one | column", results)
    assert without_table("<!-- table: two -->\n<!-- end -->\n", results) == ["one"]


def test_only_what_is_between_the_markers_changes(results: Path) -> None:
    page = "Before.\n\n<!-- table: one -->\nold\n<!-- end -->\n\nAfter.\n"
    made = rewrite(page, results)
    assert made.startswith("Before.\n\n<!-- table: one -->\n\n| case |")
    assert made.endswith("\n<!-- end -->\n\nAfter.\n")
    assert rewrite(made, results) == made


@pytest.mark.parametrize(("value", "text"), [(1738.4, "1738"), (98.76, "98.8"), (4.447, "4.45"), (0.7351, "0.735")])
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
