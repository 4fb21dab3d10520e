"""``ddp:best`` and its like: the best variant of a contender, found by a short probe in the same session.

Nobody who tunes a bucket size for a new algorithm should be compared with a reference that is not tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.workloads.contenders import contender

GRIDS: dict[str, list[str]] = {
    "ddp:best": ["ddp:1", "ddp:2", "ddp:4", "ddp:8", "ddp:25"],
    "fsdp2:best": ["fsdp2", "fsdp2:4"],
    "zero:best": ["zero:1", "zero:4", "zero:25"],
}


def to_probe(contenders: Sequence[str]) -> list[str]:
    """Returns the texts that must be measured before the best of them can be named."""
    return [text for wish in contenders for text in GRIDS.get(wish, [])]


def resolve(
    contenders: Sequence[str], measure: Callable[[list[str]], Mapping[str, float]]
) -> tuple[list[str], dict[str, Any]]:
    """Replaces each ``way:best`` by its best variant.

    Args:
        contenders: Texts.
        measure: Returns a speed by contender's name, of the texts that it is given.

    Returns:
        The texts without ``best``, and what was chosen and measured, by wish.
    """
    candidates = to_probe(contenders)
    speeds = measure(candidates) if candidates else {}
    chosen: dict[str, Any] = {}
    resolved = []
    for wish in contenders:
        if wish not in GRIDS:
            resolved.append(wish)
            continue
        found = {text: speeds[contender(text).name] for text in GRIDS[wish]}
        best = max(found, key=lambda text: found[text])
        chosen[wish] = {"best": best, "probed": found}
        resolved.append(best)
    return list(dict.fromkeys(resolved)), chosen
