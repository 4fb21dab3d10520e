"""Sources compiled several at a time: torch's headers take ten seconds a source, whatever is in it.

A batch is a source that includes others of one folder. They share what is in their unnamed namespaces, so a helper's
name is used once a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def batches(sources: Iterable[Path], size: int) -> list[list[Path]]:
    """Divides the sources by folder, into batches of about one length and at most ``size``, in the order given."""
    folders: dict[Path, list[Path]] = {}
    for source in sources:
        folders.setdefault(source.parent, []).append(source)
    parts = [(folder, -(-len(folder) // size)) for folder in folders.values()]
    return [folder[part::count] for folder, count in parts for part in range(count)]


def batch_source(batch: Sequence[Path]) -> str:
    """The text of the source that includes a batch's."""
    # clang-tidy's mark is for its own run over a batch.
    return "".join(f'#include "{source}"  // NOLINT(bugprone-suspicious-include)\n' for source in batch)
