"""Decentralized training: what :func:`torchext.attach` returns with backends that average replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of, group_of_one
from torchext.ddp.replica_notice import ReplicaNotice
from torchext.ddp.shared_memory import SharedMemory
from torchext.ddp.synchronizer import Synchronizer, active_synchronizers
from torchext.ddp.under_way import Arrivals
from torchext.decentralized.averaged_state import AveragedState
from torchext.decentralized.group_recovery import GroupRecovery
from torchext.decentralized.model_steps import ModelSteps
from torchext.decentralized.reassigned_buffers import ReassignedBuffers
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
        self._buffers = ReassignedBuffers(ddp.module, tensors)
        self._steps = ModelSteps(
            ddp, self._optimizers, self._buffers, self._check_step, self._begin_round, self._end_round
        )
        self._handles.append(self._steps)
        # All that DDP's reducer exchanges where gradients stay local is which parameters were used and, once, the order
        # of its buckets: a worker's own business, for which others need not wait, and newcomers have missed the latter.
        ddp.reducer._update_process_group(group_of_one())
        self._handles.append(_NoMatching(ddp))
        self._local_gradients = _C.keep_gradients_local(ddp.reducer)
        self._local_gradients.synchronizer = core
        self._recovery: GroupRecovery | None = None  # None: the end of its group is that of training
        self._tensors = (*tensors, *self._frozen)
        self._memory = SharedMemory(tensors)
        self._restored = False  # averaged() has nothing to restore any more
        self._averaged_states: list[AveragedState] = []  # inside averaged()
        self._same = True  # replicas do not differ: no step since all workers met
        self._notice = ReplicaNotice(ddp, self._optimizers, lambda: not (self._same or self._averaging))
        self._handles.append(self._notice)

    def _steps_inside(self) -> bool:
        return self._steps.inside

    def _continues(self) -> bool:
        return self._recovery is not None

    def _renews_world(self) -> bool:
        return self._recovery is not None and self._recovery.membership.is_world

    def refuse_uneven_inputs(self, name: str) -> None:
        """From now on ``ddp.join()`` raises: for a backend whose workers wait for each other's steps."""
        self._handles.append(_NoJoin(self._ddp, name))

    def enable_elastic(self, membership: Membership, make_core: Callable[[Any], _C.AveragingSynchronizer]) -> None:
        """From now on a worker that dies is done without, and newcomers are let in; collective, for ``attach``.

        Args:
            membership: Of this worker's group.
            make_core: Makes the C++ synchronizer of a backend; collective.
        """
        self._recovery = GroupRecovery(
            self._core,
            membership,
            make_core,
            self._tensors,
            meet=self._meet,
            leave_average=self._restore_own,
            attached=_recoveries,
        )
        if membership.is_newcomer:
            self._recovery.enter()

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
        stats = self._core.stats()
        if self._recovery is not None:
            self._recovery.add_to(stats)
        return stats

    def _wait_all(self) -> None:
        self._persist(lambda: self._core.wait_all())

    def _detach_core(self) -> None:
        try:
            self._steps.close()
            self._core.detach()
        except dist.DistBackendError:
            # Training is over here. Those that train on learn that this worker does not.
            if self._recovery is None:
                raise
            self._core.leave(timedelta(seconds=2))

    def _wait_tensors(self, positions: list[int]) -> None:
        self._persist(lambda: self._core.wait_tensors(positions))

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
        self._steps.close()
        self._buffers.restore()
        self._persist(lambda: self._core.synchronize(), collective=True)
        self._same = True

    def _enter_average(self, optimizer_state: bool) -> None:
        self._steps.close()
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

        self._restored = not self._persist(enter, collective=True)
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

    def _restore_own(self) -> None:
        """Ends the average inside ``averaged()``, for its group has failed."""
        if self._averaging and not self._restored:
            self._core.leave_average()
            self._restored = True

    def _after_meeting(self) -> None:
        if self._recovery is not None:
            self._recovery.admit_newcomers()

    def _persist(self, action: Callable[[], None], *, collective: bool = False) -> bool:
        """Does something with the core, as often as it takes; False if others are past it, and it is not done."""
        if self._recovery is not None:
            return self._recovery.persist(action, collective=collective)
        action()
        return True

    def _meet(self, core: _C.AveragingSynchronizer, steps: int | None, collectives: int) -> int:
        """The first thing that a worker does in another group: all begin from one average.

        Args:
            core: What synchronizes the model there.
            steps: Those that this worker has made; None: it is a newcomer.
            collectives: Those that it has done.

        Returns:
            How many collectives the furthest has done.
        """
        self._core = self._local_gradients.synchronizer = core
        self._buffers.restore()
        furthest = torch.tensor([steps or 0, collectives], device="cpu")
        dist.all_reduce(furthest, dist.ReduceOp.MAX, group=self._ddp.process_group)
        core.synchronize()
        most, collectives = map(int, furthest)
        core.resume(most if steps is None else steps, most)
        return collectives


def _recoveries() -> list[GroupRecovery]:
    """Those of all models that may still train, in the order of attaching."""
    attached = [model for model in active_synchronizers() if isinstance(model, AveragingSynchronizer)]
    return [model._recovery for model in attached if model._recovery is not None]


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
