"""tools/check_docs.py: what it finds in small trees, and that it finds nothing in this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tools; at the end, so that torchext stays the installed one

from tools.check_docs import anchors, findings, pages  # noqa: E402


def test_the_pages_of_this_tree() -> None:
    names = {str(page.relative_to(ROOT)) for page in pages(ROOT)}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= names
    assert list(findings(ROOT)) == []


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("[x](other.md)", ""),
        ("[x](other.md#a-heading-twice)", ""),
        ("[x](#here)\n\n# Here\n", ""),
        ("[x](https://example.org/nowhere)", ""),
        ("`[x](nowhere.md)`", ""),
        ("```text\n[x](nowhere.md)\n```\n", ""),
        ("```python\nx = 1\n```\n", ""),
        ("```sh\nx = = 1\n```\n", ""),
        ("[x](nowhere.md)", "page.md: a link leads to nowhere.md, which is not there"),
        ("[x](other.md#none)", "page.md: a link leads to other.md#none, and other.md has no such heading"),
        ("[x](#none)", "page.md: a link leads to #none, and page.md has no such heading"),
        ("```python\nx = = 1\n```\n", "page.md: a block of Python does not compile (invalid syntax): x = = 1"),
    ],
)
def test_findings(tmp_path: Path, text: str, finding: str) -> None:
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "other.md").write_text("# A heading, *twice*\n")
    assert list(findings(tmp_path)) == ([finding] if finding else [])


def test_builds_and_hidden_folders_are_left_alone(tmp_path: Path) -> None:
    for folder in ("build", "build-cpp", ".venv", ".github", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "page.md").write_text("[x](nowhere.md)")
    assert [page.parent.name for page in pages(tmp_path)] == [".github", "docs"]


def test_anchors_of_equal_headings() -> None:
    page = "# One\n## One\n```sh\n# no heading\n```\n### [Two](x.md) `three`\n"
    assert anchors(page) == {"one", "one-1", "two-three"}
