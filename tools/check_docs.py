"""Checks the pages: links that lead nowhere, and Python that does not compile: ``python tools/check_docs.py``.

Looks at every ``*.md`` of the tree. A link is a path beside the page, with the heading behind ``#`` where there is one;
addresses of the web are left alone. Needs no network.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(([^)\s]*)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_SKIPPED = {"build", "dist", "node_modules"}


def pages(root: Path) -> list[Path]:
    """The pages of a tree, without those of builds and of hidden folders but ``.github``."""

    def is_left_out(folder: str) -> bool:
        return (folder.startswith(".") and folder != ".github") or folder.startswith("build-") or folder in _SKIPPED

    every = sorted(root.rglob("*.md"))
    return [page for page in every if not any(map(is_left_out, page.relative_to(root).parts[:-1]))]


def anchors(text: str) -> set[str]:
    """What a link to the page may have behind ``#``: its headings, as GitHub and GitLab spell them."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ +(.*?) *$", _FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found[words.replace(" ", "-")] += 1
    return {f"{anchor}-{number}" if number else anchor for anchor, count in found.items() for number in range(count)}


def link_targets(text: str) -> Iterator[str]:
    """What the links of a page lead to, outside of code, addresses of the web left out."""
    for target in _LINK.findall(_INLINE_CODE.sub("", _FENCE.sub("", text))):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def linked_files(page: Path) -> set[Path]:
    """The paths that a page's links lead to."""
    targets = (target.partition("#")[0] for target in link_targets(page.read_text()))
    return {(page.parent / target).resolve() for target in targets if target}


def findings(root: Path = ROOT) -> Iterator[str]:
    """One line for each link that leads nowhere and each block of Python that is none."""
    for page in pages(root):
        text, name = page.read_text(), page.relative_to(root)
        for language, block in _FENCE.findall(text):
            if language == "python":
                try:
                    compile(block, str(name), "exec")
                except SyntaxError as error:
                    yield f"{name}: a block of Python does not compile ({error.msg}): {(error.text or '').strip()}"
        for target in link_targets(text):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists():
                yield f"{name}: a link leads to {target}, which is not there"
            elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text()):
                yield f"{name}: a link leads to {target}, and {there.name} has no such heading"


def main() -> int:
    """Prints what is wrong."""
    found = list(findings())
    print(*found, f"{len(pages(ROOT))} pages, {len(found)} findings", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
