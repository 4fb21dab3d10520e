"""One worker's loss cascades to other models of a process: which of them train on together.

Whom a model has lost is what its workers have agreed on (``membership.py``), not what the text of an error says. One
whose process has ended, or does not answer, is gone for every model that it trained. Their workers may have noticed by
different models, and would wait for each other if each began with its own: all go through all of these models, in the
order in which they were attached, which is the same on all that share two.

One that has only left a model, whatever made it, may train on with others, and those are left alone. But a script that
ends leaves one model after the other. That is waited for: as long as another model turns out to be left, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torchext.elastic.membership import Membership
from torchext.elastic.membership_round import PAUSE, Departed

__all__ = ["LEAVING", "losing"]

LEAVING = 5.0  # seconds for one that has left a model, as a script does that ends, to leave another


def losing(departed: Departed, others: Sequence[Membership]) -> list[Membership]:
    """Which other models must go on without somebody, too, or have failed already. All of these have when it returns.

    Args:
        departed: Whom one model has lost.
        others: Of the other models that may go on.
    """
    found = [other for other in others if other.has_failed or other.has(departed.dead)]
    for other in found:
        other.lose(departed.dead)
    waiting = [other for other in others if other not in found and other.has(departed.left)]
    end = time.monotonic() + LEAVING
    while waiting and time.monotonic() < end:
        left = [other for other in waiting if other.has_failed or other.is_left_by(departed.left)]
        if not left:
            time.sleep(PAUSE)
            continue
        for other in left:
            other.lose(departed.left)
        found += left
        waiting = [other for other in waiting if other not in left]
        end = time.monotonic() + LEAVING
    return found
