"""tools/run_tests.py reads what runners leave: single cases, of processes that run one and of parts that run many."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # at the end, so that torchext stays the installed one

from tools.run_tests import Counts, read_report

PASSED = '<testcase classname="Alone.Passes" name="Alone.Passes" time="0.5"/>'
PART = '<testcase classname="ranks_test.part1of4" name="ranks_test.part1of4" time="9" status="{}">{}</testcase>'
CASES = """<testsuites><testsuite>
    <testcase classname="Ranks" name="Pass/0" value_param="4-byte object" status="run" time="2.5"/>
    <testcase classname="Ranks" name="Skip" status="run" time="0"><skipped message="no GPU"/></testcase>
    <testcase classname="Ranks" name="DISABLED_Later" status="notrun" time="0"/>
    {}
</testsuite></testsuites>"""
FAILED = '<testcase classname="Ranks" name="Fail" status="run" time="1"><failure message="1"/></testcase>'


def read(folder: Path, part: str, cases: str | None) -> tuple[Counts, list[tuple[float, str]]]:
    report = folder / "cpp.xml"
    report.write_text(f"<testsuite>{PASSED}{part}</testsuite>")
    if cases is not None:
        (folder / "ranks_test.part1of4.xml").write_text(cases)
    return read_report(report, folder)


def test_a_part_stands_for_its_cases(tmp_path: Path) -> None:
    counts, times = read(tmp_path, PART.format("run", ""), CASES.format(""))
    assert counts == Counts(passed=2, failed=0, skipped=2)
    assert sorted(times, reverse=True)[:2] == [(2.5, "Ranks.Pass/0"), (0.5, "Alone.Passes")]


def test_a_case_that_fails_in_a_part(tmp_path: Path) -> None:
    counts, _ = read(tmp_path, PART.format("fail", "<failure/>"), CASES.format(FAILED))
    assert counts == Counts(passed=2, failed=1, skipped=2, names=["Ranks.Fail"])


@pytest.mark.parametrize("cases", [None, "", "<testsuites><testsuite><testcase"])
def test_a_part_that_died(tmp_path: Path, cases: str | None) -> None:
    counts, _ = read(tmp_path, PART.format("fail", "<failure/>"), cases)
    assert counts == Counts(passed=1, failed=1, names=["ranks_test.part1of4"])


def test_a_part_that_failed_behind_its_cases(tmp_path: Path) -> None:
    counts, _ = read(tmp_path, PART.format("fail", "<failure/>"), CASES.format(""))
    assert counts == Counts(passed=2, failed=1, skipped=2, names=["ranks_test.part1of4"])


def test_no_report(tmp_path: Path) -> None:
    assert read_report(tmp_path / "cpp.xml", tmp_path) == (Counts(failed=1), [])
