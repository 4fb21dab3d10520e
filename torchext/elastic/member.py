"""A worker among those that train."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from torchext.elastic.membership_round import MembershipRound, NextMembers, WorkerRoster

__all__ = ["Member"]

_logger = logging.getLogger("torchext")


@dataclass
class Member:
    """This worker's number, what it knows of the others, and where in the store they agree."""

    store: Store
    """It outlives the workers."""
    roster: WorkerRoster
    """What this worker knows of all."""
    number: int
    """This worker's, for life."""

    def round(self, attempt: int = 0) -> MembershipRound:
        """A try at the next group; the first is 0."""
        return MembershipRound(self.store, self.roster, attempt)

    def has_left(self, number: int) -> bool:
        """Whether that worker has said that it leaves."""
        try:
            return self.round().has_left(number)
        except RuntimeError:  # the store does not answer: who needs it more says so
            return False

    def break_off(self, attempt: int, interrupt: BaseException) -> None:
        """This worker was interrupted (Ctrl-C, say) among those that go on, and may live: they need not wait for it."""
        self.round().give_up(self.number)
        self.round(attempt).conclude(f"rank {self.number} was interrupted by a {type(interrupt).__name__}")

    def stay_behind(self) -> None:
        """Tells those whose group stands that this worker is not in it: they miss it there, and need not wait."""
        self.roster.groups += 1  # as theirs
        with contextlib.suppress(RuntimeError):  # the store does not answer: they find out by themselves
            self.round().give_up(self.number)

    def enroll(self, decided: NextMembers, reason: str) -> None:
        """Those on the list train from now on, which is logged with the reason of the failure before."""
        roster = self.roster
        gone, came = roster.take(decided)
        changes = [f"lost rank {', '.join(map(str, gone))} ({reason})"] if gone else []
        changes += [f"rank {', '.join(map(str, came))} joined"] if came else []
        _logger.warning(
            "torchext: %s; training goes on with %d workers, this one, rank %d, as rank %d of them",
            "; ".join(changes) or "a newcomer did not come",
            len(roster.members),
            self.number,
            roster.members.index(self.number),
        )
