"""Decentralized training: what :func:`torchext.attach` returns with backends that average replicas.

Also how it goes on when the group has failed or grown (``membership.py`` says with whom), and what is counted over the
groups that it has had.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of, group_of_one
from torchext.ddp.forward_hooks import Hook
from torchext.ddp.replica_notice import ReplicaNotice
from torchext.ddp.shared_memory import SharedMemory
from torchext.ddp.step_closures import StepBehindClosure
from torchext.ddp.step_hooks import after_step, before_step
from torchext.ddp.step_round import StepRound
from torchext.ddp.synchronizer import Synchronizer, active_synchronizers
from torchext.ddp.under_way import Arrivals
from torchext.decentralized.averaged_state import AveragedState
from torchext.decentralized.reassigned_buffers import ReassignedBuffers
from torchext.elastic.cascade import losing
from torchext.elastic.membership import Membership

__all__ = ["AveragingSynchronizer"]


class AveragingSynchronizer(Synchronizer):
    """Decentralized training: every worker steps with its own gradients, and replicas are averaged.

    ``synchronize`` and ``averaged`` form the exact average of parameters and floating-point buffers, ``averaged`` that
    of the optimizer's state as well. Behind it every worker goes on with its own, of which it holds a copy meanwhile.
    """

    _core: _C.AveragingSynchronizer

    def __init__(
        self,
        core: _C.AveragingSynchronizer,
        ddp: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(core, ddp, optimizers, _AveragedTensors(self, tensors))
        self._round = StepRound(self._optimizers, self._begin_round, self._end_round)
        self._behind_closure = StepBehindClosure(self._begin_step)
        for optimizer in self._optimizers:
            self._handles += [before_step(optimizer, self._before_step), after_step(optimizer, self._after_step)]
        if len(self._optimizers) > 1:
            self._handles.append(ddp.register_forward_pre_hook(Hook(self._enter_forward), prepend=True))
        # All that DDP's reducer exchanges where gradients stay local is which parameters were used and, once, the order
        # of its buckets: a worker's own business, for which others need not wait, and newcomers have missed the latter.
        ddp.reducer._update_process_group(group_of_one())
        self._handles.append(_NoMatching(ddp))
        self._local_gradients = _C.keep_gradients_local(ddp.reducer)
        self._local_gradients.synchronizer = core
        self._membership: Membership | None = None
        self._make_core: Callable[[Any], _C.AveragingSynchronizer] | None = None
        self._tensors = (*tensors, *self._frozen)
        self._memory = SharedMemory(tensors)
        self._buffers = ReassignedBuffers(ddp.module, tensors)
        self._stepping = False  # the optimizer's step is under way
        self._collectives = 0  # since attach: exact averages, and looks for newcomers
        self._restored = False  # averaged() has nothing to restore any more
        self._averaged_states: list[AveragedState] = []  # inside averaged()
        self._same = True  # replicas do not differ: no step since all workers met
        self._notice = ReplicaNotice(ddp, self._optimizers, lambda: not (self._same or self._averaging))
        self._handles.append(self._notice)
        self._past: list[dict[str, Any]] = []  # stats of the groups before this one
        self._left: BaseException | None = None  # why it has left its group, while it has no other
        self._ended = False  # and will have none
        self._renewing = False  # on the way to another; the model may be read, for a newcomer

    def _steps_inside(self) -> bool:
        return self._stepping

    def _continues(self) -> bool:
        return self._membership is not None

    def _renews_world(self) -> bool:
        return self._membership is not None and self._membership.is_world

    def refuse_uneven_inputs(self, name: str) -> None:
        """From now on ``ddp.join()`` raises: for a backend whose workers wait for each other's steps."""
        self._handles.append(_NoJoin(self._ddp, name))

    def enable_elastic(self, membership: Membership, make_core: Callable[[Any], _C.AveragingSynchronizer]) -> None:
        """From now on a worker that dies is done without, and newcomers are let in; collective, for ``attach``.

        Args:
            membership: Of this worker's group.
            make_core: Makes the C++ synchronizer of a backend; collective.
        """
        self._membership, self._make_core = membership, make_core
        if membership.is_newcomer:
            try:
                self._collectives = self._meet(None)
            except dist.DistBackendError as error:
                membership.fail(error)
                self._give_up(error)
                self._collectives = self._renew(None)

    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach.

        ``exposed_ms`` is what training waited; ``generator_wait_ms``, ``peer_wait_ms``, ``transfer_ms`` and ``copy_ms``
        are the averaging thread's, most of it under compute. ``group_sizes`` maps members to averages,
        ``iteration_gap`` is how many averages this worker was behind the fastest, ``consensus_distance`` is
        ``||x - mean|| / ||mean||`` at the last exact average, ``bytes_sent`` and ``bucket_bytes`` are bytes, and
        ``bytes_shared`` those of averages that went through memory which ranks of one host share.
        With ``on_peer_failure="continue"`` also ``workers``, those that train now, ``lost_ranks``, those that died, by
        their ranks at the time of attach, ``joined_ranks``, by the numbers that newcomers get after those, and
        ``recovery_ms``, what it took to go on without the ones and with the others.
        """
        return self._with_membership(self._core.stats())

    def _with_membership(self, stats: dict[str, Any]) -> dict[str, Any]:
        for past in self._past:
            for name in _COUNTERS & stats.keys():
                stats[name] = _sum(stats[name], past[name])
        if self._membership is not None:
            stats["workers"] = len(self._membership.members)
            stats["lost_ranks"] = list(self._membership.lost)
            stats["joined_ranks"] = list(self._membership.joined)
            stats["recovery_ms"] = self._membership.seconds * 1e3
        return stats

    def _wait_all(self) -> None:
        self._persist(lambda: self._core.wait_all())

    def _detach_core(self) -> None:
        try:
            self._round.close()
            self._core.detach()
        except dist.DistBackendError:
            # Training is over here. Those that train on learn that this worker does not.
            if self._membership is None:
                raise
            self._core.leave(timedelta(seconds=2))

    def _wait_tensors(self, positions: list[int]) -> None:
        self._persist(lambda: self._core.wait_tensors(positions))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._stepping = True
        put_off = self._behind_closure.put_off(optimizer, args, kwargs)
        if put_off is None:
            self._begin_step(optimizer)
        else:
            self._check_step()
        return put_off

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._buffers.restore()
        self._check_step()
        self._round.begins(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._behind_closure.begin()  # an optimizer that did not call its closure
        self._buffers.restore()
        self._round.ends(optimizer)
        self._stepping = False

    def _enter_forward(self) -> None:
        """Ends a step that one of several optimizers has no part in."""
        if torch.is_grad_enabled():
            self._round.close()

    def _begin_round(self) -> None:
        self._same = False
        self._persist(lambda: self._core.before_step())

    def _end_round(self) -> None:
        core, made = self._core, self._core.steps

        def end_step() -> None:
            # A group that fails behind its count of the step does so on the way to the next one, where a new group
            # begins: with it, too, the step would be counted twice.
            if core.steps == made:
                self._core.after_step()

        self._persist(end_step)
        self._arrivals.expect_all()
        if held := self._memory_of_scripts():
            self._arrivals.arrive_all(held)

    def _memory_of_scripts(self) -> list[int]:
        """The positions of tensors whose memory a script has kept, who reads it without asking."""
        return self._memory.held_by_others([_HELD] * len(self._memory))

    def _synchronize(self) -> None:
        self._round.close()
        self._buffers.restore()
        self._collective(lambda: self._core.synchronize())
        self._same = True

    def _enter_average(self, optimizer_state: bool) -> None:
        self._round.close()
        self._buffers.restore()
        states: list[AveragedState] = []

        def enter() -> None:
            states.clear()
            self._core.enter_average()
            if not optimizer_state:
                return
            parameters = [parameter for parameter in self._ddp.module.parameters() if id(parameter) in self._trained]
            try:  # only now: before all have met, others may wait for averages with this worker
                states.extend(AveragedState(own, parameters, self._ddp.process_group) for own in self._optimizers)
            except BaseException as error:
                self._core.leave_average()
                if not isinstance(error, dist.DistBackendError):
                    self._abandon_average(error)
                raise

        self._restored = not self._collective(enter)
        if not self._restored:
            for state in states:
                state.put()
            self._averaged_states = states

    def _abandon_average(self, error: BaseException) -> None:
        """Ends the group, in which the others wait for this worker's part."""
        backend = backend_of(self._ddp.process_group)
        assert isinstance(backend, _C.AttachableBackend)
        backend._abandon_meeting(" ".join(f"{type(error).__name__}: {error}".split())[:120])

    def _leave_average(self) -> None:
        for state in self._averaged_states:
            state.take_back()
        self._averaged_states = []
        if not self._restored:
            self._buffers.drop_assigned()  # of the average, and this worker takes its own values again
            self._core.leave_average()

    def _after_meeting(self) -> None:
        membership = self._membership
        if membership is None:
            return
        came = False

        def look() -> None:
            nonlocal came
            came = membership.newcomers()

        # Where the look fails for some, the others go on to the next thing they do together, which fails too.
        if self._collective(look) and came:
            self._recover(membership, dist.DistBackendError("torchext: newcomers join the group"))

    def _collective(self, action: Callable[[], None]) -> bool:
        """Does what all workers do equally often; False if others were past it when this one had to start anew."""
        done = self._persist(action, self._collectives)
        self._collectives += 1
        return done

    def _persist(self, action: Callable[[], None], collectives: int | None = None) -> bool:
        """Does something with the core; after a failure again, with that of the survivors, unless they are past it."""
        while True:
            try:
                if self._left is not None and not self._renewing:
                    raise self._left
                action()
                return True
            except dist.DistBackendError as error:
                if self._membership is None or self._ended:
                    raise
                most = self._recover(self._membership, error)
            if collectives is not None and most > collectives:
                return False

    def _recover(self, membership: Membership, error: BaseException) -> int:
        """Goes on with another group; returns how many collectives the furthest of it has done.

        An error that gets here is that of this model's own group: those of others are theirs. Other models go on, too,
        where they must (``cascade.py``); what keeps one of them from it is raised when that one is next used.
        """
        membership.fail(error)
        gone = membership.agree(error)
        attached = [model for model in active_synchronizers() if isinstance(model, AveragingSynchronizer)]
        others = [model for model in attached if model is not self and not model._ended]
        failed = losing(gone, [model._membership for model in others if model._membership is not None])
        models = [model for model in attached if model is self or model._membership in failed]
        if self not in models:  # its group is gone: it fails in its own way
            models.append(self)
        # All of them first: the outstanding averages of one that has failed would be in the way of the others'
        # collectives.
        for model in models:
            assert model._membership is not None
            model._give_up(error if model is self else model._membership.error())
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
        """Leaves a group that has failed, for that reason."""
        if self._averaging and not self._restored:
            self._core.leave_average()
            self._restored = True
        self._core.leave(timedelta(0))
        self._left = error

    def _renew(self, steps: int | None) -> int:
        """Trains with another group than it has left; returns how many collectives the furthest of it has done.

        The steps are those that this worker has made, or None, as of :meth:`_meet`: the next group may fail before its
        core has been told.

        The failure may show in the middle of a forward pass, where layers before have saved their parameters for the
        backward pass. Those take the average's values, as under any average that runs beside a step; autograd must not
        take it for a mistake.
        """
        assert self._membership is not None and self._make_core is not None
        with _unsafe_preserve_version_counter(self._tensors):
            while True:
                assert self._left is not None
                self._renewing = True
                try:
                    core = self._membership.renew(self._left, self._make_core)
                except dist.DistBackendError as end:
                    self._left, self._ended = end, True
                    raise
                finally:
                    self._renewing = False
                self._past.append(self._core.stats())
                self._core = self._local_gradients.synchronizer = core
                self._left = None
                try:
                    return self._meet(steps)
                except dist.DistBackendError as another:
                    self._membership.fail(another)
                    self._give_up(another)

    def _meet(self, steps: int | None) -> int:
        """The first thing that a new group does: its workers begin from one average.

        Args:
            steps: Those that this worker has made; None: it is a newcomer.

        Returns:
            How many collectives the furthest has done.
        """
        self._buffers.restore()
        furthest = torch.tensor([steps or 0, self._collectives], device="cpu")
        dist.all_reduce(furthest, dist.ReduceOp.MAX, group=self._ddp.process_group)
        self._core.synchronize()
        most, collectives = map(int, furthest)
        self._core.resume(most if steps is None else steps, most)
        return collectives


class _AveragedTensors(Arrivals):
    """Parameters and buffers, under way from a step until their average is there, or need not be waited for."""

    def __init__(self, synchronizer: AveragingSynchronizer, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._synchronizer = weakref.ref(synchronizer)
        self.expect_all()  # an iteration may begin where its forward pass does

    def arrive_all(self, positions: Sequence[int]) -> None:  # inherited
        synchronizer = self._synchronizer()
        if synchronizer is not None:
            synchronizer._wait_tensors(list(positions))
        self.settle(positions)


class _NoMatching:
    """Keeps a worker that has joined early from telling the others which parameters it used, until removed.

    The reducers of those that still train do not, for each is by itself.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        ddp._match_unused_params_allreduce = _match_nothing  # type: ignore[method-assign]

    def remove(self) -> None:
        self._ddp.__dict__.pop("_match_unused_params_allreduce", None)


def _match_nothing() -> None:
    pass


class _NoJoin:
    """Keeps ``torch.distributed.algorithms.Join`` from a model, until removed."""

    def __init__(self, ddp: DistributedDataParallel, name: str) -> None:
        self._ddp = ddp
        ddp.join_hook = functools.partial(_refuse_join, name)  # type: ignore[method-assign]

    def remove(self) -> None:
        del self._ddp.join_hook


def _refuse_join(name: str, **_: Any) -> None:
    raise RuntimeError(
        f"{name}: DistributedDataParallel.join() is not supported: the others would wait for the steps of a rank that "
        "has no more inputs; give all ranks as many (DistributedSampler does), or use prague"
    )


# How often the C++ side holds the memory of what is averaged: in the buckets, and where it was when it was attached.
_HELD = 2

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
