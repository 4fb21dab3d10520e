"""Checks the prose: long sentences, retired names, how files open: ``python tools/check_prose.py``.

A sentence of the pages has at most 35 words. An inline piece of code is one word, and tables that a script writes are
left out. Retired names are looked for as whole words in every text file that git knows. CHANGELOG.md may speak of them,
and so may the files in which an old name stays as an alias. A source file opens with "X does Y": its first comment does
not begin with "What", "How" or "From", unless it is a question (as a benchmark may ask).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 35
# Old name -> what it is called now.
RETIRED = {
    "KeptPromise": "OutstandingAverages",
    "keepAll": "drain",
    "attentive_wait": "interruptible_wait",
    "waitAttentively": "interruptible_wait",
    "attendToSignals": "checkSignals",
    "own_fault": "local_error",
    "callers_line": "call_site",
    "obituary": "PeerDied",
    "GoingOn": "NextMembers",
    "_rendezvous": "store_prefix",
    "_handover": "state_transfer",
    "_recovery": "cascade",
    "_regroup": "new_groups",
    "left_alone": "ignored_parameters",
    "told_by_main": "report_import_error",
    "NotABackendOfOursError": "UnsupportedBackendError",
    "torchext.join": "torchext.join_running_job",
    "SteppedParameter": "ProxyParameter",
    "DearOptimizer": "OptimizerAdapter",
    "KfacDirections": "Preconditioner",
    "DirectionTravel": "GradientExchange",
    "InverseTravel": "InverseExchange",
    "KfacStatistics": "FactorAccumulator",
    "max_run_mb": "bucket_cap_mb",
    "RowDirection": "PerSampleProduct",
    "RowDirections": "PerSamplePreconditioner",
    "BatchRows": "RowExchange",
    "kfac_rows": "per_sample_choice",
    "FollowedRuns": "BackgroundPipeline",
    "FollowingThread": "BackgroundWorker",
    "GroupDirection": "KroneckerProduct",
    "TiledDirection": "TiledProduct",
    "PlainMode": "EngineGuards",
    "swapMemory": "swapStorage",
    "stand_before": "hook_before_step",
    "go_on_with": "enable_elastic",
    "_strangers": "unexpected_keys",
    "_given_state": "state_loading",
    "_kept_buffers": "reassigned_buffers",
    "_uncompiled": "eager_only",
    "samples.h": "padded_samples.h",
    "quads.h": "float4.h",
    "pieces.h": "buffer_ranges.h",
}
# Where an old name stays as an alias, or is tested.
_ALIASES = {
    "NotABackendOfOursError": {"torchext/errors.py"},
    "torchext.join": set(),
    "max_run_mb": {"torchext/optim/kfac_options.py", "torchext/optim/preconditioner.py"},
}
_EXCEPTED = {"CHANGELOG.md", "tools/check_prose.py", "tests/python/test_check_prose.py"}
_EXCEPTED |= {"tests/python/package/test_old_names.py"}
# Folders whose sources open with "X does Y".
_SOURCES = ("csrc/", "kernels/", "torchext/", "tools/", "examples/", "benchmarks/", "setup.py")
_OPENING = re.compile(
    r'(?:#![^\n]*\n)?(?://|#|r?""")\s*((?:What|Who|Whom|Where|Which|How|Whether|When|Of|From|For)\b.*)'
)
_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md")
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"`[^`\n]+(?:\n[^`\n]+)?`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[\"(*]*[A-Z0-9])")
_RETIRED = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(RETIRED, reverse=True)))})(?!\w)")
_WORD = re.compile(r"\w[\w'./+-]*")


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, items of lists, and cells of tables, without code."""
    for pattern in (_FENCE, _GENERATED, _COMMENT):
        text = pattern.sub("\n", text)
    text = _LINK.sub(r"\1", _CODE.sub("Code", text))
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        table, heading = line.lstrip().startswith("|"), line.startswith("#")
        if block and (not line.strip() or table or heading or _ITEM.match(line)):
            yield " ".join(block)
            block = []
        if table:
            yield from (cell for cell in line.split("|") if cell.strip(" -"))
        elif line.strip() and not heading:
            block.append(_ITEM.sub("", line).strip())


def long_sentences(text: str, limit: int = LIMIT) -> Iterator[tuple[int, str]]:
    """Sentences of more words than the limit, with how many they have."""
    for block in blocks(text):
        for sentence in _END.split(block):
            words = len(_WORD.findall(sentence))
            if words > limit:
                yield words, sentence.strip()


def retired_names(name: str, text: str) -> Iterator[str]:
    """The retired names in the text of a file that have no business there."""
    for old in dict.fromkeys(_RETIRED.findall(text)):
        if name not in _EXCEPTED and name not in _ALIASES.get(old, set()):
            yield old


def bad_opening(name: str, text: str) -> str:
    """How a source file begins that does not say what does what; empty: it does, or no rule is for it."""
    found = _OPENING.match(text) if name.startswith(_SOURCES) and name.endswith((".h", ".cpp", ".cu", ".py")) else None
    return found[1].rstrip('."') if found and "?" not in found[1] else ""


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Every text file that git knows or would add, but results: its name, and what is in it."""
    # Also where the tree belongs to somebody else, as in the containers of continuous integration.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in sorted(set(listed.split("\0")) - {""}):
        if not name.startswith("benchmarks/results/") and (root / name).is_file():
            try:
                yield name, (root / name).read_text()
            except UnicodeDecodeError:
                continue


def findings(root: Path = ROOT) -> Iterator[str]:
    """One line for each sentence that is too long, each name that was retired, and each file that opens otherwise."""
    for page in sorted(page for pattern in _PAGES for page in root.glob(pattern)):
        for words, sentence in long_sentences(page.read_text()):
            yield f"{page.relative_to(root)}: a sentence of {words} words, {LIMIT} are allowed: {sentence[:80]} ..."
    for name, text in texts(root):
        for old in retired_names(name, text):
            yield f"{name}: {old} is called {RETIRED[old]} now"
        if opening := bad_opening(name, text):
            yield f'{name}: the file opens with "{opening[:40]}"; say "X does Y"'


def main() -> int:
    """Prints what is wrong."""
    found = list(findings())
    print(*found, f"prose: {len(found)} findings", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
