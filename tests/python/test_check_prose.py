"""tools/check_prose.py: what it finds in small texts, and that it finds nothing in this tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tools; at the end, so that torchext stays the installed one

from tools.check_prose import RETIRED, bad_opening, findings, long_sentences, retired_names  # noqa: E402

LONG = "One " + "word " * 10 + "more."  # 12 words


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git for the files of the tree")
def test_this_tree() -> None:
    assert list(findings(ROOT)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LONG, [12]),
        (f"# {LONG}\n\nShort.", []),
        (f"```text\n{LONG}\n```\n", []),
        (f"<!-- table: a -->\n{LONG}\n<!-- end -->\n", []),
        (f"| a | {LONG} |\n| --- | --- |\n| Short. | {LONG} |", [12, 12]),
        ("- One two three four five.\n- One two three four five.\n", []),
        ("One two three\nfour five. One two three four five.", []),
        ("One two three four five; six\nseven eight nine ten eleven.", [11]),
        ("One `two three four five six seven eight nine ten` eleven.", []),
        ("One [two three](four.md) five.", []),
    ],
)
def test_long_sentences(text: str, words: list[int]) -> None:
    assert [found for found, _ in long_sentences(text, limit=10)] == words


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", "def attentive_wait(): ...", ["attentive_wait"]),
        ("a.py", "interruptible_wait, attentive_waiter, my_own_fault", []),
        ("a.h", '#include "samples.h"  // and padded_samples.h', ["samples.h"]),
        ("a.md", "torchext.join(x), torchext.join_running_job(x)", ["torchext.join"]),
        ("torchext/errors.py", "NotABackendOfOursError = UnsupportedBackendError", []),
        ("torchext/run.py", "NotABackendOfOursError", ["NotABackendOfOursError"]),
        ("CHANGELOG.md", "torchext.join", []),
    ],
)
def test_retired_names(name: str, text: str, found: list[str]) -> None:
    assert list(retired_names(name, text)) == found


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("csrc/core/a.h", "// Who averages with whom: by a table.", "Who averages with whom: by a table"),
        ("csrc/core/a.h", "// GroupTable says who averages with whom.", ""),
        ("csrc/core/a.h", "// Whole groups end together.", ""),
        ("torchext/a.py", '"""From a name to its group."""', "From a name to its group"),
        ("tools/a.py", '#!/usr/bin/env python3\n"""How files are named."""', "How files are named"),
        ("benchmarks/a.py", '"""What does it cost? Two hosts."""', ""),
        ("tests/python/a.py", '"""What attach refuses."""', ""),
        ("torchext/a.py", "from torch import nn", ""),
    ],
)
def test_openings(name: str, text: str, found: str) -> None:
    assert bad_opening(name, text) == found


def test_no_name_is_retired_into_another_that_is() -> None:
    assert not set(RETIRED.values()) & set(RETIRED)


@pytest.mark.skipif(shutil.which("git") is None, reason="asks git for the files of the tree")
def test_findings_name_file_and_remedy(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "README.md").write_text("Word " * 36 + ".\n")
    (tmp_path / "a.cpp").write_text("keepAll();\n")
    long, retired = findings(tmp_path)
    assert long.startswith("README.md: a sentence of 36 words, 35 are allowed: Word Word")
    assert retired == "a.cpp: keepAll is called drain now"
