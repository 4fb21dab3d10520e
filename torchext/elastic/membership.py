"""Who trains: what ``attach(..., on_peer_failure="continue")`` does when a worker dies, and when one comes.

Every worker has a number for life: its rank at the time of attach, or the next free one when it joins later.

Who is left. When a group fails, every process of it that lives says so in the store, from a thread of the backend: it
counts as alive whatever its training thread is doing. Once all have spoken but the one that is known to be dead (a
newcomer that gives up says so itself, as does a worker whose script ends), or after :data:`GRACE` more than half, the
first training thread to notice writes down who is left, and what it writes is final (``compare_set``). A process that
is not on the list, because it was stopped for longer than that, is told so and cannot come back by itself. Where half
or more are silent and might live, behind a broken link, nobody goes on.

Who comes. When all workers have formed an exact average, the first of them looks for newcomers (``newcomers.py``) and
writes the same kind of list, with them on it.

With whom. Those on the list make a new group, which takes the place of the old one as the model's process group (and as
the default group, if that is what it was). Nothing of the old group is used: a store that outlives the dead is all it
takes, which is torchrun's, and not that of a rank 0 which keeps it in its own process. Should one of them die before
the group stands, the others miss it there and draw up another list, and a newcomer asks again. Whether the group stands
is written down once (``compare_set``), by its first worker when all have connected, or by whoever could not: nobody
goes on with a group that another has given up.

With what. Each has its own replica and optimizer state; what was half exchanged is given up. A newcomer gets the first
worker's. All begin with the exact average of their replicas.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import BACKENDS, Replacement, backend_of, replacing
from torchext.backends.new_groups import new_world, shrunk
from torchext.backends.store_prefix import attempt_store
from torchext.elastic import membership_round
from torchext.elastic.membership_round import FORMED, GRACE, Departed, MembershipRound, NextMembers, WorkerRoster
from torchext.elastic.model_group import ModelGroup
from torchext.elastic.newcomers import Newcomer, NewcomerAdmission, Request, root_of
from torchext.elastic.state_transfer import receive, send, unpack

__all__ = ["Membership"]

ATTEMPTS = 3  # at a new group, which is missed by one that died after the list was made
ENTRIES = 5  # attempts of a newcomer

_logger = logging.getLogger("torchext")


class _LeftBehind(dist.DistBackendError):
    """The group stands, and this worker has failed to come into it."""


class Membership(ModelGroup):
    """The workers that train a model, and the group that they have at the time.

    Args:
        ddp: The model to attach. Its group is the workers', or, for a newcomer, that of one made by
            ``join_running_job``.
        optimizers: Their states go to newcomers, with the model's.
        newcomer: What ``join_running_job`` has prepared; then this waits until the workers let it in.

    Raises:
        ValueError: The newcomer does not fit.
        torch.distributed.DistError: Nobody let the newcomer in.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        newcomer: Newcomer | None = None,
    ) -> None:
        super().__init__(ddp)
        self._optimizers = optimizers
        self.is_newcomer = newcomer is not None
        self.seconds = 0.0
        """What it took to go on with another group, in all."""
        if newcomer is None:
            self._begin()
        else:
            self._enter(newcomer)
        self._admission = NewcomerAdmission(
            self._store, Request.of(self._backend, self._options, ddp.module, optimizers)
        )

    @property
    def members(self) -> list[int]:
        """The workers that train now, in the order of their ranks."""
        return self._roster.members

    @property
    def lost(self) -> list[int]:
        """Those that do not any more, in the order of their loss."""
        return self._roster.lost

    @property
    def joined(self) -> list[int]:
        """Those that came later, in the order of their coming."""
        return self._roster.joined

    def _begin(self) -> None:
        group = self._ddp.process_group
        self._take(group)
        members = list(range(len(self._ranks)))
        self._me = dist.get_rank(group)
        options = backend_of(group).options
        assert isinstance(options, _C.PragueOptions | _C.HopOptions | _C.DSSyncOptions)  # dear's members do not change
        self._options = options
        name = dist.get_backend(group)
        # "cpu:gloo,cuda:prague" has no name of its own
        self._backend = name if name in BACKENDS else dist.get_backend_config(group)
        self.is_world = group is dist.group.WORLD
        token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
        dist.broadcast(token, group=group, group_src=0)
        self._store = root_of(dist.distributed_c10d._world.pg_map[group][1])
        self._roster = WorkerRoster(bytes(token.tolist()).hex(), members, numbers=len(members))
        self._announce()

    # ---- Failures ----

    def is_left_by(self, ranks: Collection[int]) -> bool:
        """Whether one of these ranks of the world has said that it leaves the model."""
        return any(self._has_left(number) for number, rank in self._workers() if rank in ranks)

    def _workers(self) -> Iterator[tuple[int, int]]:
        """The number and the rank in the world of each."""
        return zip(self.members, self._ranks, strict=True)

    def _has_left(self, number: int) -> bool:
        try:
            return self._round().has_left(number)
        except RuntimeError:  # the store does not answer: who needs it more says so
            return False

    def agree(self, error: BaseException) -> Departed:
        """Who does not go on where the group has failed; the same on all that do, and final.

        Args:
            error: Why the group has failed.

        Raises:
            torch.distributed.DistBackendError: As :meth:`renew`.
        """
        started = time.monotonic()
        decided = self._agree(error, 0, set(), self._failure())
        self.seconds += time.monotonic() - started
        gone = {number: rank for number, rank in self._workers() if number not in decided.survivors}
        left = frozenset(rank for number, rank in gone.items() if self._has_left(number))
        return Departed(dead=frozenset(gone.values()) - left, left=left)

    def renew(self, error: BaseException, make_core: Callable[[Any], _C.AveragingSynchronizer]) -> Any:
        """Makes a group of those that go on, and with it what synchronizes the model; collective among them.

        Args:
            error: Why the group has failed.
            make_core: Makes the C++ synchronizer of a backend; collective.

        Raises:
            torch.distributed.DistBackendError: All live, so that ``error`` is of another kind; or the others went on
                without this process; or it may be one of a minority.
        """
        started = time.monotonic()
        while True:
            newcomers = self._form_next_group(error)
            try:
                group = self._ddp.process_group
                if dist.get_rank(group) == 0:
                    for rank in newcomers:
                        send(self._ddp.module, self._optimizers, rank, group)
                core = make_core(backend_of(group))
                break
            except dist.DistBackendError as another:
                self.fail(another)
                error = another
        self.seconds += time.monotonic() - started
        return core

    def _form_next_group(self, error: BaseException) -> range:
        """The ranks of newcomers in the new group."""
        dead: set[int] = set()
        reason = self._failure()
        for attempt in range(ATTEMPTS):
            decided = self._agree(error, attempt, dead, reason)
            try:
                self._form(decided, attempt)
                break
            except _LeftBehind:
                raise
            except RuntimeError as missing:  # DistStoreError as a rule, or what Gloo raises when it cannot connect
                if attempt == ATTEMPTS - 1:
                    raise
                _logger.warning("torchext: the new group did not come about (%s); trying again", missing)
        self._enroll(decided, reason)
        return range(len(decided.survivors), len(decided.members))

    def _failure(self) -> str:
        """The reason of the group's; what happens to it is no news from now on."""
        backend = self._attachable()
        backend._withdraw_announcements()
        return backend.failure[1]

    def _lost(self) -> set[int]:
        """Whom the group that has failed knows to be gone by now, and not only silent."""
        return {self.members[rank] for rank in self._attachable()._lost_ranks}

    def _agree(self, error: BaseException, attempt: int, dead: set[int], reason: str) -> NextMembers:
        """Who goes on, this worker among them.

        Args:
            error: Why the group has failed.
            attempt: At a new group.
            dead: Whom the lists of earlier attempts lack; more come to it.
            reason: Of the failure.
        """
        try:
            decided = self._decide(attempt, dead, reason)
            dead |= set(self.members) - set(decided.survivors)  # who is on no list cannot come back
        except (dist.DistNetworkError, dist.DistStoreError) as lost:
            raise dist.DistBackendError(
                f"torchext: cannot train on, as the store where the workers would agree on who is left does not"
                f" answer ({lost}); the group had failed: {reason}"
            ) from error
        except dist.DistBackendError:  # nobody goes on
            raise
        except BaseException as interrupt:
            self._break_off(attempt, interrupt)
            raise
        if self._me not in decided.survivors:
            raise dist.DistBackendError(
                f"torchext: the others train on without rank {self._me}, which did not answer in time when the"
                f" group failed ({reason}); start it anew"
            ) from error
        if decided.members == self.members and attempt == 0:
            raise error
        return decided

    def _decide(self, attempt: int, dead: set[int], reason: str) -> NextMembers:
        """Who goes on: the same in every process that is told."""
        # Who has not heard of the failure finds it by a timeout of its own, in a wait that may only have begun.
        patience = GRACE + 2 * self._options._timeout.total_seconds()
        return self._round(attempt).decide(
            self._me,
            self.members,
            first=self._round(),
            dead=dead,
            # With the second attempt the others have left the group that has failed: that they do is no death.
            lost=self._lost if attempt == 0 else set,
            grace=GRACE,
            patience=patience,
            reason=reason,
        )

    def _break_off(self, attempt: int, interrupt: BaseException) -> None:
        """This worker was interrupted (Ctrl-C, say) among those that go on, and may live: they need not wait for it."""
        self._round().give_up(self._me)
        self._round(attempt).conclude(f"rank {self._me} was interrupted by a {type(interrupt).__name__}")

    # ---- The new group ----

    def _form(self, decided: NextMembers, attempt: int) -> None:
        """Makes the group of those on a list that of the model. Raises RuntimeError on all of them, or on none."""
        this_round = self._round(attempt)
        _C.fault_point("membership.listed")

        def settle() -> None:
            outcome = this_round.outcome(self._me, decided)
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
            with this_round.watching(self._me, self._round(attempt + 1)), replacing(replacement):
                self._take(self._made(decided, replacement))
        except RuntimeError as error:
            # What it was made of ends here, and is not held by the error: those that have come must miss this one.
            traceback.clear_frames(error.__traceback__)
            outcome = this_round.conclude(f"rank {self._me} did not come into it: {error}")
            if outcome == FORMED:
                self._stay_behind()
                raise _LeftBehind(
                    f"torchext: the others train on without rank {self._me}, which could not come into their group"
                    f" ({error}); start it anew"
                ) from error
            raise dist.DistBackendError(outcome) from error
        except BaseException as interrupt:
            self._break_off(attempt, interrupt)
            raise

    def _made(self, decided: NextMembers, replacement: Replacement) -> ProcessGroup:
        if not self.is_world:
            stay = [position for position, number in enumerate(self.members) if number in decided.survivors]
            return shrunk(self._ddp.process_group, stay)
        members = decided.members
        rank = members.index(self._me)
        options = self._options._fitted(members)
        # All are there before anything of the old group is given up.
        store = attempt_store(
            replacement.store, rank, len(members), replacement.patience, replacement.called_off, is_fresh=True
        )
        return new_world(self._backend, store, rank, len(members), options)

    def _enroll(self, decided: NextMembers, reason: str) -> None:
        roster = self._roster
        gone, came = roster.take(decided)
        changes = [f"lost rank {', '.join(map(str, gone))} ({reason})"] if gone else []
        changes += [f"rank {', '.join(map(str, came))} joined"] if came else []
        _logger.warning(
            "torchext: %s; training goes on with %d workers, this one, rank %d, as rank %d of them",
            "; ".join(changes) or "a newcomer did not come",
            len(roster.members),
            self._me,
            roster.members.index(self._me),
        )
        self._announce()

    # ---- Newcomers ----

    def newcomers(self) -> bool:
        """Whether there is a list with newcomers on it, for :meth:`renew`; collective."""
        if not self._takes_newcomers():
            return False
        group = self._ddp.process_group
        decided = torch.zeros(1, device="cpu")
        if dist.get_rank(group) == 0:
            try:
                decided.fill_(self._admit())
            except RuntimeError as error:  # of the store, which training needs not
                _logger.warning("torchext: nobody can join, since the store does not answer (%s)", error)
        dist.broadcast(decided, group=group, group_src=0)
        return bool(decided)

    def _admit(self) -> bool:
        """Puts those who wait for admission on a list; whether there are any."""
        waiting = self._admission.newcomers()
        if waiting:
            numbers = {str(request): self._roster.numbers + place for place, request in enumerate(waiting)}
            answer = asdict(self._roster) | {"timeout": self._options._timeout.total_seconds()}
            for request in waiting:
                self._admission.admit(request, answer)
            self._round().write(NextMembers(self.members, numbers))
        return bool(waiting)

    def _takes_newcomers(self) -> bool:
        # Of a newcomer it is not known in which rack it stands; and it is in the world, not in a part of it.
        return self.is_world and not getattr(self._options, "racks", [])

    def _enter(self, newcomer: Newcomer) -> None:
        self._options, self._backend = newcomer.options, newcomer.backend
        self._store = newcomer.store
        self.is_world = True
        for entry in range(ENTRIES):
            request, answer = newcomer.ask(self._ddp.module, self._optimizers)
            self._options._timeout = timedelta(seconds=answer.pop("timeout"))
            self._roster = WorkerRoster(**answer)
            try:
                decided, state = self._come_in(request)
                break
            except RuntimeError as error:
                if dist.is_initialized():
                    dist.destroy_process_group()
                if entry == ENTRIES - 1:
                    raise dist.DistBackendError(f"torchext.join_running_job: not let in by {ENTRIES} tries") from error
                _logger.warning(
                    "torchext.join_running_job: the workers lost one of them meanwhile (%s); asking again", error
                )
        try:
            unpack(state, self._ddp.module, self._optimizers)
        except Exception as error:
            self._give_up()
            raise ValueError(
                f"torchext.join_running_job: this worker cannot load what the job's first worker has sent"
                f" ({type(error).__name__}: {error}); make model and optimizer as the job does"
            ) from error
        self._enroll(decided, "")

    def _come_in(self, request: int) -> tuple[NextMembers, torch.Tensor]:
        """Who trains from now on, and the state that the first of them has sent. RuntimeError: ask again."""
        decided = self._round().read()
        number = decided.newcomers.get(str(request))
        if number is None:
            raise dist.DistBackendError("the workers went on without newcomers")
        self._me = number
        self._form(decided, 0)
        try:
            return decided, receive()
        except RuntimeError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Leaves the group that stands already."""
        self._stay_behind()
        dist.destroy_process_group()

    def _stay_behind(self) -> None:
        """Tells those whose group stands that this worker is not in it: they miss it there, and need not wait."""
        self._roster.groups += 1  # as theirs
        with contextlib.suppress(RuntimeError):  # the store does not answer: they find out by themselves
            self._round().give_up(self._me)

    # ---- Their round in the store ----

    def _round(self, attempt: int = 0) -> MembershipRound:
        return MembershipRound(self._store, self._roster, attempt)

    def _announce(self) -> None:
        self._attachable()._announce_member(self._round().store, self._me)

    def _attachable(self) -> _C.AttachableBackend:
        backend = backend_of(self._ddp.process_group)
        assert isinstance(backend, _C.AttachableBackend)
        return backend
