"""Those that train on make a new group, in the place of the one before.

It becomes the model's process group, and the default group, if that is what the old one was. Nothing of the old group
is used: a store that outlives the dead is all it takes. That is torchrun's, and not that of a rank 0 which keeps it in
its own process.

Whether the group stands is written down once (``compare_set``), by its first worker when all have connected, or by
whoever could not: nobody goes on with a group that another has given up. Should one of them die before the group
stands, the others miss it there and draw up another list, and a newcomer asks again.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup

from torchext import _C
from torchext.backends import Replacement, replacing
from torchext.backends.new_groups import new_world, shrunk
from torchext.backends.store_prefix import attempt_store
from torchext.elastic import membership_round
from torchext.elastic.member import Member
from torchext.elastic.membership_round import FORMED, NextMembers

__all__ = ["GroupFormation", "LeftBehindError"]


class LeftBehindError(dist.DistBackendError):
    """The group stands, and this worker has failed to come into it."""


@dataclass(frozen=True)
class GroupFormation:
    """What all groups of a model have in common, and how the next one is made."""

    backend: str
    """Their name in torch."""
    options: Any
    """The first group's; those of the next are fitted to its members."""
    is_world: bool
    """Whether they are the default group. If not, each is made of the one before."""

    @property
    def takes_newcomers(self) -> bool:
        """Whether a group with newcomers in it can be made."""
        # Of a newcomer it is not known in which rack it stands; and it is in the world, not in a part of it.
        return self.is_world and not getattr(self.options, "racks", [])

    def form(self, member: Member, decided: NextMembers, attempt: int, before: ProcessGroup) -> ProcessGroup:
        """Makes a group of those on a list; collective among them.

        Args:
            member: This worker, which is on it.
            decided: The list.
            attempt: At a new group; the first is 0.
            before: The group whose place it takes.

        Raises:
            RuntimeError: On all of them, or on none.
            LeftBehindError: On this worker only.
        """
        this_round = member.round(attempt)
        _C.fault_point("membership.listed")

        def settle() -> None:
            outcome = this_round.outcome(member.number, decided)
            if outcome != FORMED:
                raise dist.DistBackendError(outcome)
            _C.fault_point("group.formed")

        # In a round with newcomers, and when a group did not come about, they are at nothing else.
        prompt = attempt > 0 or bool(decided.newcomers)
        replacement = Replacement(
            store=PrefixStore("group", this_round.store),
            patience=decided.connecting if prompt else membership_round.PATIENCE,
            connecting=decided.connecting,
            called_off=lambda: this_round.concluded,
            settle=settle,
        )
        try:
            if this_round.concluded:  # the others have waited for this one in vain
                raise dist.DistBackendError("came too late")
            with this_round.watching(member.number, member.round(attempt + 1)), replacing(replacement):
                return self._make(member, decided, replacement, before)
        except RuntimeError as error:
            # What it was made of ends here, and is not held by the error: those that have come must miss this one.
            traceback.clear_frames(error.__traceback__)
            outcome = this_round.conclude(f"rank {member.number} did not come into it: {error}")
            if outcome == FORMED:
                member.stay_behind()
                raise LeftBehindError(
                    f"torchext: the others train on without rank {member.number}, which could not come into their group"
                    f" ({error}); start it anew"
                ) from error
            raise dist.DistBackendError(outcome) from error
        except BaseException as interrupt:
            member.break_off(attempt, interrupt)
            raise

    def _make(
        self, member: Member, decided: NextMembers, replacement: Replacement, before: ProcessGroup
    ) -> ProcessGroup:
        if not self.is_world:
            stay = [place for place, number in enumerate(member.roster.members) if number in decided.survivors]
            return shrunk(before, stay)
        rank, size = decided.members.index(member.number), len(decided.members)
        options = self.options._fitted(decided.members)
        # All are there before anything of the old group is given up.
        store = attempt_store(
            replacement.store, rank, size, replacement.patience, replacement.called_off, is_fresh=True
        )
        return new_world(self.backend, store, rank, size, options)
