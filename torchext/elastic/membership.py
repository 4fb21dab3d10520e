"""Membership carries out ``attach(..., on_peer_failure="continue")`` when a worker dies, and when one comes.

Every worker has a number for life: its rank at the time of attach, or the next free one when it joins later.

Who is left: those of a failed group agree on a list of them (``survivor_agreement.py``).

Who comes. When all workers have formed an exact average, the first of them looks for newcomers (``newcomers.py``) and
writes the same kind of list, with them on it.

With whom: those on the list make a new group, which takes the place of the old one (``group_formation.py``).

With what. Each has its own replica and optimizer state; what was half exchanged is given up. A newcomer gets the first
worker's (``state_transfer.py``). All begin with the exact average of their replicas.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import BACKENDS, backend_of
from torchext.elastic.group_formation import GroupFormation, LeftBehindError
from torchext.elastic.member import Member
from torchext.elastic.membership_round import Departed, MembershipRound, NextMembers, WorkerRoster
from torchext.elastic.model_group import ModelGroup
from torchext.elastic.newcomers import Newcomer, NewcomerAdmission, Request, root_of
from torchext.elastic.state_transfer import receive, send, unpack
from torchext.elastic.survivor_agreement import SurvivorAgreement

__all__ = ["Membership"]

ATTEMPTS = 3  # at a new group, which is missed by one that died after the list was made
ENTRIES = 5  # attempts of a newcomer

_logger = logging.getLogger("torchext")


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
            self._member.store,
            Request.of(self._formation.backend, self._formation.options, ddp.module, optimizers),
        )

    @property
    def members(self) -> list[int]:
        """The workers that train now, in the order of their ranks."""
        return self._member.roster.members

    @property
    def lost(self) -> list[int]:
        """Those that do not any more, in the order of their loss."""
        return self._member.roster.lost

    @property
    def joined(self) -> list[int]:
        """Those that came later, in the order of their coming."""
        return self._member.roster.joined

    @property
    def is_world(self) -> bool:
        """Whether their group is the default group."""
        return self._formation.is_world

    def _begin(self) -> None:
        group = self._ddp.process_group
        self._take(group)
        options = backend_of(group).options
        assert isinstance(options, _C.PragueOptions | _C.HopOptions | _C.DSSyncOptions)  # dear's members do not change
        name = dist.get_backend(group)
        # "cpu:gloo,cuda:prague" has no name of its own
        name = name if name in BACKENDS else dist.get_backend_config(group)
        self._formation = GroupFormation(name, options, is_world=group is dist.group.WORLD)
        token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
        dist.broadcast(token, group=group, group_src=0)
        members = list(range(len(self._ranks)))
        roster = WorkerRoster(bytes(token.tolist()).hex(), members, numbers=len(members))
        store = root_of(dist.distributed_c10d._world.pg_map[group][1])
        self._member = Member(store, roster, dist.get_rank(group))
        self._announce()

    # ---- Failures ----

    def is_left_by(self, ranks: Collection[int]) -> bool:
        """Whether one of these ranks of the world has said that it leaves the model."""
        return any(self._member.has_left(number) for number, rank in self._workers() if rank in ranks)

    def _workers(self) -> Iterator[tuple[int, int]]:
        """The number and the rank in the world of each."""
        return zip(self.members, self._ranks, strict=True)

    def agree(self, error: BaseException) -> Departed:
        """Who does not go on where the group has failed; the same on all that do, and final.

        Args:
            error: Why the group has failed.

        Raises:
            torch.distributed.DistBackendError: As :meth:`renew`.
        """
        started = time.monotonic()
        decided = self._agreement(error).decide()
        self.seconds += time.monotonic() - started
        gone = {number: rank for number, rank in self._workers() if number not in decided.survivors}
        left = frozenset(rank for number, rank in gone.items() if self._member.has_left(number))
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
        agreement = self._agreement(error)
        for attempt in range(ATTEMPTS):
            decided = agreement.decide(attempt)
            try:
                self._form(decided, attempt)
                break
            except LeftBehindError:
                raise
            except RuntimeError as missing:  # DistStoreError as a rule, or what Gloo raises when it cannot connect
                if attempt == ATTEMPTS - 1:
                    raise
                _logger.warning("torchext: the new group did not come about (%s); trying again", missing)
        self._enroll(decided, agreement.reason)
        return range(len(decided.survivors), len(decided.members))

    def _agreement(self, error: BaseException) -> SurvivorAgreement:
        """On the failure of the group; what happens to that is no news from now on."""
        backend = self._attachable()
        backend._withdraw_announcements()
        timeout = self._formation.options._timeout
        return SurvivorAgreement(self._member, error, backend.failure[1], self._lost, timeout)

    def _lost(self) -> set[int]:
        """Whom the group that has failed knows to be gone by now, and not only silent."""
        return {self.members[rank] for rank in self._attachable()._lost_ranks}

    def _form(self, decided: NextMembers, attempt: int) -> None:
        self._take(self._formation.form(self._member, decided, attempt, self._ddp.process_group))

    def _enroll(self, decided: NextMembers, reason: str) -> None:
        self._member.enroll(decided, reason)
        self._announce()

    def _announce(self) -> None:
        self._attachable()._announce_member(self._member.round().store, self._member.number)

    def _attachable(self) -> _C.AttachableBackend:
        backend = backend_of(self._ddp.process_group)
        assert isinstance(backend, _C.AttachableBackend)
        return backend

    # ---- Newcomers ----

    def newcomers(self) -> bool:
        """Whether there is a list with newcomers on it, for :meth:`renew`; collective."""
        if not self._formation.takes_newcomers:
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
            roster = self._member.roster
            numbers = {str(request): roster.numbers + place for place, request in enumerate(waiting)}
            answer = asdict(roster) | {"timeout": self._formation.options._timeout.total_seconds()}
            for request in waiting:
                self._admission.admit(request, answer)
            self._member.round().write(NextMembers(roster.members, numbers))
        return bool(waiting)

    def _enter(self, newcomer: Newcomer) -> None:
        self._formation = GroupFormation(newcomer.backend, newcomer.options, is_world=True)
        for entry in range(ENTRIES):
            request, answer = newcomer.ask(self._ddp.module, self._optimizers)
            newcomer.options._timeout = timedelta(seconds=answer.pop("timeout"))
            try:
                decided, state = self._come_in(newcomer, WorkerRoster(**answer), request)
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

    def _come_in(self, newcomer: Newcomer, roster: WorkerRoster, request: int) -> tuple[NextMembers, torch.Tensor]:
        """Who trains from now on, and the state that the first of them has sent. RuntimeError: ask again."""
        decided = MembershipRound(newcomer.store, roster).read()
        number = decided.newcomers.get(str(request))
        if number is None:
            raise dist.DistBackendError("the workers went on without newcomers")
        self._member = Member(newcomer.store, roster, number)
        self._form(decided, 0)
        try:
            return decided, receive()
        except RuntimeError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Leaves the group that stands already."""
        self._member.stay_behind()
        dist.destroy_process_group()
