"""Runs every test runner and adds up what they counted: ``python tools/run_tests.py [suite ...]``.

Suites: cpp, asan, tsan (CMake and ctest), python, distributed, everyday, frameworks, packaging (pytest), slow (pytest,
those marked slow). Without names, all but slow. --every N: of the suites that start processes only each N-th case, and
of none those marked long.
MAX_JOBS: compilers at a time, and tests, unless TEST_JOBS says otherwise for them.
A suite that breaks before it can count is one failure; the others still run. At the end stand the slowest cases, those
that failed, and what each suite counted and took. The last line is always "N passed, N failed, N skipped", and the exit
status is 0 only if nothing failed and something ran.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "reports"
JOBS = os.environ.get("MAX_JOBS", "2")

# Suite -> the value of TORCHEXT_SANITIZE.
CPP_SUITES = {"cpp": "", "asan": "address", "tsan": "thread"}
PYTEST_SUITES = ["python", "distributed", "everyday", "frameworks", "packaging"]
# Suites of which --every leaves cases out.
SAMPLED_SUITES = {"distributed", "everyday"}
# Suites in which all tests of a file share what its processes did.
SHARED_SUITES = {"frameworks"}
TEST_JOBS = os.environ.get("TEST_JOBS", JOBS)
# The name in ctest of a process that runs many cases (torchext_add_test of cmake/TorchextTargets.cmake).
PART = re.compile(r"\.part\d+of\d+")
SLOWEST = 10  # cases that are listed at the end


@dataclass
class Counts:
    """What one suite, or all of them, counted, and the names of the cases that failed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    names: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def __iadd__(self, other: Counts) -> Counts:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.names += other.names
        return self


def run(*command: str | Path) -> int:
    """Runs a command in the source tree, its output on this terminal, without input."""
    environment = dict(os.environ)
    if command[0] == "cmake":  # for ccache: what another clone has compiled counts, too
        environment |= {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    # Each of thousands of processes would compile the modules of its test anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False
    ).returncode


def read_report(report: Path, parts: Path) -> tuple[Counts, list[tuple[float, str]]]:
    """Counts of a JUnit file, and the seconds of each case; one failure when the runner left none.

    A part stands for the cases of its own report, which it left in the folder ``parts``.
    """
    try:
        root = ElementTree.parse(report).getroot()
    except (FileNotFoundError, ElementTree.ParseError):
        return Counts(failed=1), []
    counts = Counts()
    times: list[tuple[float, str]] = []
    for case in root.iter("testcase"):
        folder, name = str(case.get("classname")), str(case.get("name"))
        # ctest gives both the name, and behind it the bytes of the parameter.
        whole = name.partition("  # ")[0] if folder == name else f"{folder}.{name}"
        failed = case.find("failure") is not None or case.find("error") is not None
        if PART.search(whole):
            inner, inner_times = read_report(parts / f"{whole}.xml", parts)
            if failed and inner.failed == 0:
                inner.failed = 1
            if inner.failed and not inner.names:  # it died, or failed outside its cases
                inner.names = [whole]
            counts += inner
            times += inner_times
            continue
        times.append((float(case.get("time") or 0), whole))
        if failed:
            counts.failed += 1
            counts.names.append(whole)
        elif case.find("skipped") is not None or case.get("status") in {"disabled", "notrun"}:
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts, times


def run_cpp(suite: str, report: Path) -> int:
    """Configures, builds and runs one flavour of the C++ tests."""
    if subprocess.run(["bash", ROOT / "tools" / "system_packages.sh", "test"], check=False).returncode != 0:
        return 1
    folder = ROOT / f"build-{suite}"
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    benchmarks = "OFF" if CPP_SUITES[suite] else "ON"
    return (
        run(
            *("cmake", "-S", ".", "-B", folder, "-G", "Ninja", "--log-level=WARNING", *launcher),
            f"-DTORCHEXT_SANITIZE={CPP_SUITES[suite]}",
            f"-DTORCHEXT_BUILD_BENCHMARKS={benchmarks}",
            f"-DPython_EXECUTABLE={sys.executable}",
        )
        or run("cmake", "--build", folder, "-j", JOBS)
        or run(
            "ctest", "--test-dir", folder, "-j", TEST_JOBS, "--output-on-failure", "--quiet", "--output-junit", report
        )
    )


def run_pytest(suite: str, report: Path, every: int) -> int:
    """Runs one folder of Python tests (or, for slow, the marked ones of all)."""
    marks = "not slow" if every == 1 else "not slow and not long"
    selected = ["-m", "slow", "tests"] if suite == "slow" else ["-m", marks, f"tests/{suite}"]
    if suite != "slow" and not any((ROOT / "tests" / suite).rglob("test_*.py")):
        print(f"tests/{suite} holds no test")
        return 1
    # The files of a shared suite begin in the order of its conftest.py.
    divided = ["loadfile", "--no-loadscope-reorder"] if suite in SHARED_SUITES else ["worksteal"]
    parallel = ["-n", TEST_JOBS, "--dist", *divided] if suite != "slow" and TEST_JOBS != "1" else []
    sampled = [f"--every={every}"] if suite in SAMPLED_SUITES else []
    return run(sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *parallel, *sampled, *selected)


def run_suite(suite: str, every: int) -> tuple[Counts, list[tuple[float, str]]]:
    """Runs one suite and returns what :func:`read_report` does; a non-zero exit is a failure even if it shows none."""
    report = REPORTS / f"{suite}.xml"
    report.unlink(missing_ok=True)
    parts = ROOT / f"build-{suite}" / "parts"
    shutil.rmtree(parts, ignore_errors=not parts.exists())
    status = run_cpp(suite, report) if suite in CPP_SUITES else run_pytest(suite, report, every)
    counts, times = read_report(report, parts)
    if status != 0 and counts.failed == 0:
        counts.failed = 1
    return counts, times


def main() -> int:
    """Runs the named suites."""
    known = [*CPP_SUITES, *PYTEST_SUITES, "slow"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="suite", help=", ".join(known))
    parser.add_argument("--every", type=int, default=1, metavar="N", help="see above")
    arguments = parser.parse_args()
    suites = arguments.suites or known[:-1]
    if arguments.every < 1:
        parser.error(f"--every must be 1 or more, got {arguments.every}")
    if unknown := set(suites) - set(known):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(known)}")

    REPORTS.mkdir(parents=True, exist_ok=True)
    total, lines = Counts(), []
    cases: list[tuple[float, str]] = []
    for suite in suites:
        print(f"\n== {suite}", flush=True)
        started = time.monotonic()
        counts, times = run_suite(suite, arguments.every)
        cases += times
        lines.append(f"{suite:<12} {counts}, {time.monotonic() - started:.0f} s")
        total += counts
    slowest = [f"{seconds:6.1f} s  {name}" for seconds, name in heapq.nlargest(SLOWEST, cases)]
    failed = ["The failed cases:", *(f"  {name}" for name in total.names), ""] if total.names else []
    print("\nThe slowest cases:", *slowest, "", *failed, *lines, total, sep="\n", flush=True)
    return 0 if total.failed == 0 and total.passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
