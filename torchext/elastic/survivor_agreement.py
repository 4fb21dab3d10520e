"""The workers of a group that has failed agree on who is left.

Every process of it that lives says so in the store, from a thread of the backend: it counts as alive whatever its
training thread is doing. A process that is known to be dead is not waited for. Neither is a newcomer that gives up, or
a worker whose script ends: they say so themselves.

Once all others have spoken, or after :data:`GRACE` more than half, the first training thread to notice writes down who
is left. What it writes is final (``compare_set``). A process that is not on the list, because it was stopped for longer
than that, is told so and cannot come back by itself. Where half or more are silent and might live, behind a broken
link, nobody goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from torchext.elastic.member import Member
from torchext.elastic.membership_round import GRACE, NextMembers

__all__ = ["SurvivorAgreement"]


class SurvivorAgreement:
    """Who goes on after one failure, at the first try at a new group and at those that follow.

    Args:
        member: This worker, in the group that has failed.
        error: What it got from the group.
        reason: Why the group has failed.
        lost: Tells whom this worker knows to be gone by now, and not only silent.
        timeout: The group's.
    """

    def __init__(
        self, member: Member, error: BaseException, reason: str, lost: Callable[[], set[int]], timeout: timedelta
    ) -> None:
        self._member, self._error, self.reason = member, error, reason
        self._lost, self._timeout = lost, timeout
        self._dead: set[int] = set()  # whom the lists of earlier tries lack

    def decide(self, attempt: int = 0) -> NextMembers:
        """Who goes on, this worker among them; the same on all that do, and final.

        Args:
            attempt: At a new group.

        Raises:
            torch.distributed.DistBackendError: All live, so that the error is of another kind; or the others went on
                without this process; or it may be one of a minority; or the store does not answer.
        """
        number, members = self._member.number, self._member.roster.members
        try:
            decided = self._listed(attempt)
            self._dead |= set(members) - set(decided.survivors)  # who is on no list cannot come back
        except (dist.DistNetworkError, dist.DistStoreError) as lost:
            raise dist.DistBackendError(
                f"torchext: cannot train on, as the store where the workers would agree on who is left does not"
                f" answer ({lost}); the group had failed: {self.reason}"
            ) from self._error
        except dist.DistBackendError:  # nobody goes on
            raise
        except BaseException as interrupt:
            self._member.break_off(attempt, interrupt)
            raise
        if number not in decided.survivors:
            raise dist.DistBackendError(
                f"torchext: the others train on without rank {number}, which did not answer in time when the"
                f" group failed ({self.reason}); start it anew"
            ) from self._error
        if decided.members == members and attempt == 0:
            raise self._error
        return decided

    def _listed(self, attempt: int) -> NextMembers:
        """The list, which is the same in every process that is told."""
        return self._member.round(attempt).decide(
            self._member.number,
            self._member.roster.members,
            first=self._member.round(),
            dead=self._dead,
            # With the second attempt the others have left the group that has failed: that they do is no death.
            lost=self._lost if attempt == 0 else set,
            grace=GRACE,
            # Who has not heard of the failure finds it by a timeout of its own, in a wait that may only have begun.
            patience=GRACE + 2 * self._timeout.total_seconds(),
            reason=self.reason,
        )
