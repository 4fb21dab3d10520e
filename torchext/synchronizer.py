"""Synchronizers: what :func:`torchext.attach` returns."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext._forward_waits import ForwardWaits
from torchext._membership import Membership

__all__ = ["AveragingSynchronizer", "Synchronizer"]


class Synchronizer(abc.ABC):
    """Keeps an attached model in step with the other workers; made by :func:`torchext.attach`.

    What all backends have. :class:`~torchext.DearSynchronizer` and :class:`~torchext.HopSynchronizer` add to it.
    ``synchronize``, ``averaged`` and ``detach`` are collective: every rank calls them, in the same order.
    """

    def __init__(
        self,
        core: _C.Synchronizer,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._core = core
        self._ddp = ddp
        self._optimizer = optimizer
        self._averaging = False
        self._detached = False
        self._waits = ForwardWaits(ddp, tensors, self._wait_tensors, self.wait)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __reduce__(self) -> Any:
        # In copies and pickles of the model, which stands for itself: None, not attached.
        return type(None), ()

    def synchronize(self) -> None:
        """Makes parameters (and what else the backend averages) complete and the same on all workers, now."""
        self._check_attached("synchronize")
        self._synchronize()
        self._after_meeting()

    def _synchronize(self) -> None:
        self._core.synchronize()

    def _wait_tensors(self, positions: list[int]) -> None:
        self._core.wait_tensors(positions)

    def _wait_all(self) -> None:
        self._core.wait_all()

    def _detach_core(self) -> None:
        self._core.detach()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Inside, the model is the same on all workers (evaluation, checkpoints); yields it, without its DDP wrapper.

        The optimizer must not step inside.
        """
        self._check_attached("averaged")
        self._enter_average()
        self._averaging = True
        try:
            yield self._ddp.module
        finally:
            self._averaging = False
            self._leave_average()
            self._after_meeting()  # the others do, whatever happened here

    def wait(self) -> None:
        """Blocks until nothing is under way: for code that reads parameters between a step and the next forward."""
        self._wait_all()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients of the next step so that their norm is at most ``max_norm``; call it before the step.

        As ``torch.nn.utils.clip_grad_norm_``, but for the gradients that the optimizer will step with: with ``dear``
        those of all workers together (collective, exact), with a decentralized backend this worker's own.

        Returns:
            The norm before clipping, a tensor without dimensions.

        Raises:
            ValueError: ``max_norm`` is negative or NaN; no gradient was changed.
        """
        self._check_attached("clip_grad_norm_")
        _check_max_norm(max_norm)
        return torch.nn.utils.clip_grad_norm_(self._ddp.module.parameters(), max_norm, norm_type)

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach; what they are depends on the backend."""

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position, for checkpoints."""
        return {"version": 1, "steps": self._core.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; the same on all ranks.

        Raises:
            TypeError: it is no mapping.
            ValueError: it is not what :meth:`state_dict` gives; nothing was restored.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"Synchronizer.load_state_dict: the state must be a mapping, got {state!r}; pass what state_dict() gave"
            )
        for key in ("version", "steps"):
            if key not in state:
                raise ValueError(
                    f"Synchronizer.load_state_dict: {key} is missing, got {', '.join(map(str, state)) or 'nothing'}; "
                    "pass what state_dict() gave"
                )
        version, steps = state["version"], state["steps"]
        if version != 1:
            raise ValueError(f"Synchronizer.load_state_dict: version must be 1, got {version!r}")
        # The schedule counts in 64 bits.
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 2**63:
            raise ValueError(
                f"Synchronizer.load_state_dict: steps must be an int in [0, 2**63), got {steps!r}; pass what "
                "state_dict() gave"
            )
        self._core.steps = steps

    def detach(self) -> None:
        """Ends taking part: gradients stay local and nothing is exchanged any more. Safe twice."""
        if self._detached:
            return
        self._detached = True
        self._remove_hooks()
        self._detach_core()

    def _enter_average(self) -> None:
        self._synchronize()

    def _leave_average(self) -> None:  # noqa: B027  # nothing to restore where replicas do not differ
        pass

    def _after_meeting(self) -> None:  # noqa: B027  # nothing to do where the workers stay the same
        """All workers have met, and train on."""

    def _check_attached(self, what: str) -> None:
        if self._detached:
            raise RuntimeError(f"Synchronizer.{what} after detach(); wrap the module in a new DistributedDataParallel")
        if self._averaging:
            raise RuntimeError(f"Synchronizer.{what} inside averaged(); leave the with block first")

    def _remove_hooks(self) -> None:
        self._waits.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, *_: Any) -> None:
        if self._averaging:
            raise RuntimeError("optimizer.step() inside averaged(): the step would be lost when the block ends")
        self._core.before_step()

    def _after_step(self, *_: Any) -> None:
        self._core.after_step()


class AveragingSynchronizer(Synchronizer):
    """Decentralized training: every worker steps with its own gradients, and replicas are averaged.

    ``synchronize`` and ``averaged`` form the exact average of parameters and floating-point buffers; after
    ``averaged`` every worker goes on with its own, of which it holds a copy meanwhile.
    """

    _core: _C.AveragingSynchronizer

    def __init__(
        self,
        core: _C.AveragingSynchronizer,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(core, ddp, optimizer, tensors)
        self._local_gradients = _C.keep_gradients_local(ddp.reducer)
        self._local_gradients.synchronizer = core
        self._membership: Membership | None = None
        self._make_core: Callable[[Any], _C.AveragingSynchronizer] | None = None
        self._tensors = tuple(tensors)
        self._collectives = 0  # since attach: exact averages, and looks for newcomers
        self._restored = False  # averaged() has nothing to restore any more
        self._past: list[dict[str, Any]] = []  # stats of the groups before this one

    def refuse_uneven_inputs(self, name: str) -> None:
        """From now on ``ddp.join()`` raises: for a backend whose workers wait for each other's steps."""
        self._handles.append(_NoJoin(self._ddp, name))

    def go_on_with(self, membership: Membership, make_core: Callable[[Any], _C.AveragingSynchronizer]) -> None:
        """From now on a worker that dies is done without, and newcomers are let in; collective, for ``attach``.

        Args:
            membership: Of this worker's group.
            make_core: Makes the C++ synchronizer of a backend; collective.
        """
        self._membership, self._make_core = membership, make_core
        if membership.is_newcomer:
            self._collectives = self._meet(0)

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
            self._core.detach()
        except dist.DistBackendError:
            # Nobody waits for this worker any more, and training is over.
            if self._membership is None:
                raise
            self._core.leave(timedelta(0))

    def _wait_tensors(self, positions: list[int]) -> None:
        self._persist(lambda: self._core.wait_tensors(positions))

    def _before_step(self, *args: Any) -> None:
        self._persist(lambda: super(AveragingSynchronizer, self)._before_step(*args))

    def _after_step(self, *_: Any) -> None:
        self._persist(lambda: self._core.after_step())

    def _synchronize(self) -> None:
        self._collective(lambda: self._core.synchronize())

    def _enter_average(self) -> None:
        self._restored = not self._collective(lambda: self._core.enter_average())

    def _leave_average(self) -> None:
        if not self._restored:
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
                action()
                return True
            except dist.DistBackendError as error:
                if self._membership is None:
                    raise
                most = self._recover(self._membership, error)
            if collectives is not None and most > collectives:
                return False

    def _recover(self, membership: Membership, error: BaseException) -> int:
        """Goes on with another group; returns how many collectives the furthest of it has done.

        The failure may show in the middle of a forward pass, where layers before have saved their parameters for the
        backward pass. Those take the average's values, as under any average that runs beside a step; autograd must not
        take it for a mistake.
        """
        with _unsafe_preserve_version_counter(self._tensors):
            return self._renew(membership, error)

    def _renew(self, membership: Membership, error: BaseException) -> int:
        assert self._make_core is not None
        while True:
            membership.fail(error)
            old = self._core
            if self._averaging and not self._restored:
                old.leave_average()
                self._restored = True
            self._past.append(old.stats())
            steps = old.steps
            old.leave(timedelta(0))
            self._core = self._local_gradients.synchronizer = membership.renew(error, self._make_core)
            try:
                return self._meet(steps)
            except dist.DistBackendError as another:
                error = another

    def _meet(self, steps: int) -> int:
        """The first thing that a new group does: its workers begin from one average and one number of steps."""
        furthest = torch.tensor([steps, self._collectives])
        dist.all_reduce(furthest, dist.ReduceOp.MAX, group=self._ddp.process_group)
        self._core.steps = int(furthest[0])
        self._core.synchronize()
        return int(furthest[1])


class _NoJoin:
    """Keeps ``torch.distributed.algorithms.Join`` from a model, until removed."""

    def __init__(self, ddp: DistributedDataParallel, name: str) -> None:
        self._ddp = ddp
        ddp.join_hook = functools.partial(_refuse_join, name)  # type: ignore[method-assign]

    def remove(self) -> None:
        del self._ddp.join_hook


def _check_max_norm(max_norm: float) -> None:
    # A negative one would turn gradients around, NaN would be in every one of them.
    if not float(max_norm) >= 0:
        raise ValueError(
            f"Synchronizer.clip_grad_norm_: max_norm must be 0 or more, got {max_norm}; inf only measures the norm"
        )


def _refuse_join(name: str, **_: Any) -> None:
    raise RuntimeError(
        f"{name}: DistributedDataParallel.join() is not supported: the others would wait for the steps of a rank that "
        "has no more inputs; give all ranks as many (DistributedSampler does), or use prague"
    )


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
