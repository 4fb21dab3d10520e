"""A model trains on when its group has failed or grown; ``torchext/elastic/membership.py`` says with whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from torchext import _C
from torchext.elastic.cascade import losing
from torchext.elastic.membership import Membership

__all__ = ["GroupRecovery"]

# Makes a C++ synchronizer the model's, which has made so many steps (None: it is a newcomer) and done so many
# collectives. Returns how many collectives the furthest worker has done.
_Meet = Callable[[_C.AveragingSynchronizer, int | None, int], int]


class GroupRecovery:
    """Goes on with another group than the one that an attached model has, in the middle of what needs the group.

    It owns what outlives a group: what this worker has done with all others, what it has counted, and why it has left
    the last one. Threads that train the model call it.

    Args:
        core: The C++ synchronizer of the first group.
        membership: The workers.
        make_core: Makes that of another group's backend; collective.
        tensors: What is averaged.
        meet: The first thing that a worker does in another group; collective.
        leave_average: Inside ``averaged()``, takes this worker's own values back, for the group has failed.
        attached: Tells those of all models that may still train, in the order of attaching.
    """

    def __init__(
        self,
        core: _C.AveragingSynchronizer,
        membership: Membership,
        make_core: Callable[[Any], _C.AveragingSynchronizer],
        tensors: tuple[torch.Tensor, ...],
        *,
        meet: _Meet,
        leave_average: Callable[[], None],
        attached: Callable[[], list[GroupRecovery]],
    ) -> None:
        self._core, self.membership, self._make_core, self._tensors = core, membership, make_core, tensors
        self._meet, self._leave_average, self._attached = meet, leave_average, attached
        self._collectives = 0  # since attach: exact averages, and looks for newcomers
        self._past: list[dict[str, Any]] = []  # stats of the groups before this one
        self._left: BaseException | None = None  # why it has left its group, while it has no other
        self._ended = False  # and will have none
        self._renewing = False  # on the way to another; the model may be read, for a newcomer

    def enter(self) -> None:
        """Comes as a newcomer into the first group; collective."""
        try:
            self._collectives = self._meet(self._core, None, 0)
        except dist.DistBackendError as error:
            self._give_up(error)
            self._collectives = self._renew(None)

    def persist(self, action: Callable[[], None], *, collective: bool = False) -> bool:
        """Does something with the core; after a failure again, with that of the survivors.

        Args:
            action: Takes the core that the model has at the time.
            collective: All workers do it equally often.

        Returns:
            False where the survivors were past a collective when this worker had to start anew.
        """
        done = False
        while not done:
            try:
                if self._left is not None and not self._renewing:
                    raise self._left
                action()
                done = True
            except dist.DistBackendError as error:
                if self._ended:
                    raise
                most = self._recover(error)
                if collective and most > self._collectives:
                    break
        self._collectives += collective
        return done

    def admit_newcomers(self) -> None:
        """Goes on with those who wait for admission; collective."""
        came = False

        def look() -> None:
            nonlocal came
            came = self.membership.newcomers()

        # Where the look fails for some, the others go on to the next thing they do together, which fails too.
        if self.persist(look, collective=True) and came:
            self._recover(dist.DistBackendError("torchext: newcomers join the group"))

    def add_to(self, stats: dict[str, Any]) -> None:
        """Adds what earlier groups have counted to what this one has, and who trains."""
        for past in self._past:
            for name in _COUNTERS & stats.keys():
                stats[name] = _sum(stats[name], past[name])
        stats["workers"] = len(self.membership.members)
        stats["lost_ranks"] = list(self.membership.lost)
        stats["joined_ranks"] = list(self.membership.joined)
        stats["recovery_ms"] = self.membership.seconds * 1e3

    def _recover(self, error: BaseException) -> int:
        """Goes on with another group; returns how many collectives the furthest of it has done.

        An error that gets here is that of this model's own group: those of others are theirs. Other models go on, too,
        where they must (``cascade.py``); what keeps one of them from it is raised when that one is next used.
        """
        self.membership.fail(error)
        gone = self.membership.agree(error)
        attached = self._attached()
        others = [model.membership for model in attached if model is not self and not model._ended]
        failed = losing(gone, others)
        models = [model for model in attached if model is self or model.membership in failed]
        if self not in models:  # its group is gone: it fails in its own way
            models.append(self)
        # All of them first: the outstanding averages of one that has failed would be in the way of the others'
        # collectives.
        for model in models:
            model._leave(error if model is self else model.membership.error())
        # And those of the models that go on as they are: who waits for this worker there does not come to a new group.
        _C.drain_averages()
        most = 0
        for model in models:
            with contextlib.suppress(dist.DistBackendError):  # kept in _left
                collectives = model._renew(model._core.steps)
                most = collectives if model is self else most
        if self._left is not None:
            raise self._left
        return most

    def _give_up(self, error: BaseException) -> None:
        """Leaves a group that has failed for this worker, and may not have for the others."""
        self.membership.fail(error)
        self._leave(error)

    def _leave(self, error: BaseException) -> None:
        """Leaves a group that has failed, for that reason."""
        self._leave_average()
        self._core.leave(timedelta(0))
        self._left = error

    def _renew(self, steps: int | None) -> int:
        """Trains with another group than it has left; returns how many collectives the furthest of it has done.

        The steps are those that this worker has made, or None: it is a newcomer. The core does not tell them, as the
        next group may fail before its core has been told.

        The failure may show in the middle of a forward pass, where layers before have saved their parameters for the
        backward pass. Those take the average's values, as under any average that runs beside a step; autograd must not
        take it for a mistake.
        """
        with _unsafe_preserve_version_counter(self._tensors):
            while True:
                assert self._left is not None
                self._renewing = True
                try:
                    core = self.membership.renew(self._left, self._make_core)
                except dist.DistBackendError as end:
                    self._left, self._ended = end, True
                    raise
                finally:
                    self._renewing = False
                self._past.append(self._core.stats())
                self._core, self._left = core, None
                try:
                    return self._meet(core, steps, self._collectives)
                except dist.DistBackendError as another:
                    self._give_up(another)


# Of stats(), what adds up over several groups.
_COUNTERS = {
    *("steps", "averages", "group_sizes", "exposed_ms", "generator_wait_ms", "peer_wait_ms", "transfer_ms", "copy_ms"),
    *("bytes_sent", "bytes_shared", "skipped", "gaps", "ages", "too_late", "not_sent", "waits"),
    *("model_wait_ms", "token_wait_ms", "send_wait_ms"),
}


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        return {key: left.get(key, 0) + right.get(key, 0) for key in sorted({*left, *right})}
    return left + right
