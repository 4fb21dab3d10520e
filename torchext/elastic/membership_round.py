"""Workers agree in the store on the next members, and on whether the group of these stands.

There is a round for every try at a new group. What is written down in one is final (``compare_set``): the list of
those that go on, by the first training thread that may, and then the outcome, by the first worker on the list when all
have connected, or by whoever could not.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from torchext import _C

__all__ = [
    "CONNECTING",
    "FORMED",
    "GRACE",
    "PATIENCE",
    "PAUSE",
    "Departed",
    "MembershipRound",
    "NextMembers",
    "WorkerRoster",
]

GRACE = 2.0  # seconds for a survivor to say that it lives; a thread of its says so, within milliseconds as a rule
PATIENCE = timedelta(seconds=30)  # for all to come to a new group, from whatever they were at
CONNECTING = timedelta(seconds=10)  # for those that have come to connect,
CONNECTING_EACH = timedelta(milliseconds=50)  # and for each of them
PAUSE = 0.01
LOOK = 0.05  # between the looks of a thread that only looks

FORMED = "formed"


@dataclass(frozen=True)
class NextMembers:
    """The list of those that train on."""

    survivors: list[int]
    newcomers: dict[str, int] = field(default_factory=dict)
    """By their requests, the numbers they get."""

    @property
    def members(self) -> list[int]:
        """All of them, in the order of their ranks."""
        return [*self.survivors, *self.newcomers.values()]

    @property
    def connecting(self) -> timedelta:
        """How long they may take to connect."""
        return CONNECTING + len(self.members) * CONNECTING_EACH


@dataclass(frozen=True)
class Departed:
    """Those of a group that do not train on, by their ranks in the world."""

    dead: frozenset[int]
    """Their processes have ended, or do not answer: they are gone for every model."""
    left: frozenset[int]
    """They have said that they leave this model: they may train on with others."""


@dataclass
class WorkerRoster:
    """What the workers know of each other, and a newcomer is told."""

    token: str
    """Under which their keys are in the store."""
    members: list[int]
    """The workers that train now, in the order of their ranks."""
    lost: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    numbers: int = 0
    """Given away so far."""
    groups: int = 0
    """Made so far, the first one not counted."""

    def take(self, decided: NextMembers) -> tuple[list[int], list[int]]:
        """Those on the list are the members from now on. Returns who has gone, and who came."""
        gone = [number for number in self.members if number not in decided.survivors]
        came = list(decided.newcomers.values())
        self.lost += gone
        self.joined += came
        self.numbers += len(came)
        self.groups += 1
        self.members = decided.members
        return gone, came


class MembershipRound:
    """One try at a new group.

    Args:
        store: That outlives the workers.
        roster: Of the group before.
        attempt: The first is 0.
    """

    def __init__(self, store: Store, roster: WorkerRoster, attempt: int = 0) -> None:
        self.store = PrefixStore(f"torchext/workers/{roster.token}/{roster.groups}/{attempt}", store)

    def decide(
        self,
        me: int,
        members: Collection[int],
        *,
        first: MembershipRound,
        dead: Collection[int],
        lost: Callable[[], set[int]],
        grace: float,
        patience: float,
        reason: str,
    ) -> NextMembers:
        """Who goes on: the same in every process that is told.

        Args:
            me: This worker, which lives.
            members: Of the group that has failed, this one among them.
            first: The round of the first try, where newcomers say that they give up, and workers that their script
                ends.
            dead: Those that are known to be, from an earlier try.
            lost: Tells whom this worker knows to be dead by now. The others learn it in the store: as a rule only one
                worker sees the connection of a dead one close.
            grace: Seconds after which more than half need not wait for the rest.
            patience: Seconds after which fewer give up.
            reason: Of the failure.

        Raises:
            torch.distributed.DistBackendError: Half or more are silent and might live.
        """
        self.store.set(f"alive/{me}", "1")
        _C.fault_point("membership.alive")
        started = time.monotonic()
        told: set[int] = set()
        while not self.store.check(["decision"]):
            seen = lost()
            for number in seen - told:
                self.store.set(f"dead/{number}", "1")
            told |= seen
            # A process that ends may live a while, and its group's failure says so; it has said before that it goes.
            gone = {n for n in members if n in dead or first.has_left(n) or self.store.check([f"dead/{n}"])}
            alive = [number for number in members if number not in gone and self.store.check([f"alive/{number}"])]
            silent = set(members) - set(alive)
            waited = time.monotonic() - started
            if silent <= gone or (2 * len(alive) > len(members) and waited > grace):
                self.write(NextMembers(alive))
                break
            if waited > patience:
                raise dist.DistBackendError(
                    f"torchext: cannot train on with {len(alive)} of {len(members)} workers, as it is not known"
                    f" that the others are dead: after {waited:.1f} s ranks {sorted(silent)} have said nothing, and"
                    f" might go on by themselves ({reason})"
                )
            time.sleep(PAUSE)
        return self.read()

    def write(self, decided: NextMembers) -> None:
        """Writes the list down unless another has."""
        self.store.compare_set("decision", "", json.dumps(asdict(decided)))

    def read(self) -> NextMembers:
        """The list, once it is written down."""
        self.store.wait(["decision"], PATIENCE)
        decided = self.listed()
        assert decided is not None  # what stands there stays
        return decided

    def listed(self) -> NextMembers | None:
        """The list, if it is written down."""
        return NextMembers(**json.loads(self.store.get("decision"))) if self.store.check(["decision"]) else None

    def outcome(self, me: int, decided: NextMembers) -> str:
        """Of those that are connected here; RuntimeError if it was not to be had in time."""
        self.store.set(f"connected/{me}", "1")
        if decided.members[0] == me:
            self._await_connected(decided)
            return self.conclude(FORMED)
        self.store.wait(["outcome"], 2 * decided.connecting)
        return self.store.get("outcome").decode()

    def _await_connected(self, decided: NextMembers) -> None:
        """Until all are, or somebody has given up: who goes on waiting then comes too late to the next list."""
        connected = [f"connected/{number}" for number in decided.members]
        deadline = time.monotonic() + decided.connecting.total_seconds()
        while not self.store.check(connected) and not self.concluded:
            if time.monotonic() > deadline:
                missing = [number for number in decided.members if not self.store.check([f"connected/{number}"])]
                raise dist.DistStoreError(f"ranks {missing} did not connect within {decided.connecting}")
            time.sleep(PAUSE)

    def conclude(self, outcome: str) -> str:
        """Writes the outcome down unless another has; returns what stands there."""
        return self.store.compare_set("outcome", "", outcome).decode()

    @property
    def concluded(self) -> bool:
        """Whether there is an outcome."""
        return self.store.check(["outcome"])

    @contextlib.contextmanager
    def watching(self, me: int, following: MembershipRound) -> Iterator[None]:
        """Says in the round that follows that this worker lives, as soon as this one has ended without a group.

        Its training thread may hear of that only when it has waited in vain for a connection, and the others go by who
        has spoken.
        """
        over = threading.Event()
        # Of its own: a store serves one call at a time, and that of the training thread may wait for an address.
        ended, lives = self.store.clone(), following.store.clone()

        def watch() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone: the training thread says so
                while not over.wait(LOOK):
                    if ended.check(["outcome"]):
                        if ended.get("outcome").decode() != FORMED:
                            lives.set(f"alive/{me}", "1")
                        return

        thread = threading.Thread(target=watch, name="torchext_round", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(1.0)  # but for a call of a store that does not answer

    def give_up(self, me: int) -> None:
        """Says that this worker is no member any more: the others must not wonder whether it lives."""
        self.store.set(f"gone/{me}", "1")

    def has_left(self, number: int) -> bool:
        """Whether that worker has said so; its backend says it when it leaves the group, or its script ends."""
        return self.store.check([f"gone/{number}"])
