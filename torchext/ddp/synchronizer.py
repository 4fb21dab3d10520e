"""Synchronizer is what :func:`torchext.attach` returns, whatever the backend."""

from __future__ import annotations

import abc
import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.base.plain import plain
from torchext.ddp.forward_hooks import wait_in_front
from torchext.ddp.step_guard import refuse_other_optimizers
from torchext.ddp.under_way import Arrivals

__all__ = ["Synchronizer", "abandon_ended", "active_synchronizers", "exchanged_parameters", "ignored_parameters"]

_attached: weakref.WeakValueDictionary[int, Synchronizer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def active_synchronizers() -> list[Synchronizer]:
    """Those that may still train, in the order of attaching: not detached, and their groups live."""
    return [synchronizer for _, synchronizer in sorted(_attached.items()) if synchronizer._is_active()]


def exchanged_parameters() -> set[int]:
    """The ids of parameters that a synchronizer exchanges, or may come to exchange."""
    return set[int]().union(*(other._trained for other in _attached.values() if other._may_exchange()))


def abandon_ended(optimizer: torch.optim.Optimizer) -> None:
    """Frees an optimizer of synchronizers whose groups were destroyed without ``detach()``.

    Raises:
        ValueError: Its state is not whole.
    """
    for synchronizer in list(_attached.values()):
        owned = any(own is optimizer for own in synchronizer._optimizers)
        if owned and not synchronizer._detached and not synchronizer._is_active():
            synchronizer._abandon()


def ignored_parameters(ddp: DistributedDataParallel) -> set[int]:
    """The ids of parameters and buffers that DDP was told to ignore: each worker has its own."""
    module, told = ddp.module, ddp.parameters_to_ignore
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    others = [*(t for name, t in named if name not in told), *ddp._delay_all_reduce_params]
    return {id(t) for name, t in named if name in told}.difference(map(id, others))


class Synchronizer(abc.ABC):
    """Keeps an attached model in step with the other workers; made by :func:`torchext.attach`.

    What all backends have. :class:`~torchext.DearSynchronizer` and :class:`~torchext.HopSynchronizer` add to it.
    ``synchronize``, ``averaged`` and ``detach`` are collective: every rank calls them, in the same order.

    It belongs to its model and process group, and is not copied: ``copy.deepcopy``, ``pickle`` and ``torch.save`` make
    None of it, so that a copy of the model is one that is not attached. What to save is :meth:`state_dict`.
    """

    def __init__(
        self,
        core: _C.Synchronizer,
        ddp: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        arrivals: Arrivals,
    ) -> None:
        self._core = core
        self._ddp = ddp
        self._optimizers = tuple(optimizers)
        self._averaging = False
        self._detached = False
        _attached[next(_numbers)] = self
        ignored = ignored_parameters(ddp)
        self._trained = {id(p) for p in ddp.module.parameters() if p.requires_grad} - ignored
        self._frozen = [p for p in ddp.module.parameters() if not p.requires_grad and id(p) not in ignored]
        self._arrivals = arrivals
        self._handles: list[Any] = []
        self._waits: list[Any] | None = None  # in front of forward passes; None: nothing will be under way
        self._wait_in_front(True)
        refuse_other_optimizers(active_synchronizers)

    def __reduce__(self) -> Any:
        # In copies and pickles of the model, which stands for itself: None, not attached.
        return type(None), ()

    def synchronize(self) -> None:
        """Makes parameters (and what else the backend averages) complete and the same on all workers, now.

        Raises:
            RuntimeError: After :meth:`detach` or inside :meth:`averaged`; a tensor of the model has been given other
                memory since ``attach``.
            torch.distributed.DistBackendError: The group has failed. With ``on_peer_failure="continue"``: and this
                worker cannot go on with the others.
        """
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
    def averaged(self, *, optimizer_state: bool = True) -> Iterator[nn.Module]:
        """Inside, the model is the same on all workers (evaluation, checkpoints); yields it, without its DDP wrapper.

        So is the optimizer's state, which a checkpoint holds, too. The optimizer must not step inside, and what is
        loaded into it or into the model inside is lost when the block ends.

        Args:
            optimizer_state: False leaves the optimizer's state as it is, for an evaluation that saves nothing: with
                Adam that is a third of the time and of the memory. With ``dear`` there is no difference.

        Raises:
            RuntimeError: After :meth:`detach` or inside :meth:`averaged`; a tensor of the model has been given other
                memory since ``attach``. From ``optimizer.step()`` inside.
            torch.distributed.DistBackendError: As :meth:`synchronize`.
        """
        self._check_attached("averaged")
        self._enter_average(optimizer_state)
        self._averaging = True
        try:
            yield self._ddp.module
        finally:
            self._averaging = False
            self._leave_average()
            self._after_meeting()  # the others do, whatever happened here

    def wait(self) -> None:
        """Blocks until nothing is under way: for code that reads parameters between a step and the next forward.

        Raises:
            torch.distributed.DistBackendError: As :meth:`synchronize`. With ``dear`` also what the rest of the step
                raises, which is made in here.
        """
        self._wait_all()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients of the next step so that their norm is at most ``max_norm``; call it before the step.

        As ``torch.nn.utils.clip_grad_norm_``, but for the gradients that the optimizer will step with: with ``dear``
        those of all workers together (collective, exact), with a decentralized backend this worker's own.

        Returns:
            The norm before clipping, a tensor without dimensions.

        Raises:
            ValueError: ``max_norm`` is negative or NaN; no gradient was changed.
            RuntimeError: After :meth:`detach` or inside :meth:`averaged`.
            torch.distributed.DistBackendError: With ``dear``: the group has failed.
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
        version, steps = state["version"], plain(state["steps"])
        if version != 1:
            raise ValueError(f"Synchronizer.load_state_dict: version must be 1, got {version!r}")
        # The schedule counts on from there, in 64 bits.
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= 2**62:
            raise ValueError(
                f"Synchronizer.load_state_dict: steps must be an int in [0, 2**62], got {steps!r}; pass what "
                "state_dict() gave"
            )
        self._core.steps = steps

    def detach(self) -> None:
        """Ends taking part: gradients stay local and nothing is exchanged any more. Safe twice.

        Raises:
            torch.distributed.DistBackendError: The group has failed; this worker has ended taking part all the same.
                With ``on_peer_failure="continue"`` nothing is raised: the others learn that it leaves.
        """
        if self._detached:
            return
        self._detached = True
        self._remove_hooks()
        try:
            self._detach_core()
        finally:
            self._arrivals.settle_all()

    def _abandon(self) -> None:
        """As :meth:`detach`, where the group has ended, with nobody else."""
        self._detached = True
        self._remove_hooks()
        self._arrivals.settle_all()

    def _leave_at_exit(self) -> None:
        """A script that ends without detach() or destroy_process_group() still does what it owes, for two seconds."""
        self._core.leave(timedelta(seconds=2))

    def _enter_average(self, optimizer_state: bool) -> None:
        self._synchronize()

    def _leave_average(self) -> None:  # noqa: B027  # nothing to restore where replicas do not differ
        pass

    def _after_meeting(self) -> None:  # noqa: B027  # nothing to do where the workers stay the same
        """All workers have met, and train on."""

    def _is_active(self) -> bool:
        return not self._detached and self._ddp.process_group in dist.distributed_c10d._world.pg_map

    def _may_exchange(self) -> bool:
        return self._is_active()

    def _continues(self) -> bool:
        """Whether a worker's death makes its process group anew."""
        return False

    def _renews_world(self) -> bool:
        """Whether a worker's death makes the default process group anew (``on_peer_failure="continue"``)."""
        return False

    def _check_attached(self, what: str) -> None:
        if self._detached:
            raise RuntimeError(f"Synchronizer.{what} after detach(); wrap the module in a new DistributedDataParallel")
        if self._averaging:
            raise RuntimeError(f"Synchronizer.{what} inside averaged(); leave the with block first")

    def _wait_in_front(self, needed: bool) -> None:
        """Has forward passes wait for what is under way, or, where nothing will be, cost nothing."""
        if needed == (self._waits is not None):
            return
        for handle in self._waits or ():
            handle.remove()
        self._waits = wait_in_front(self._ddp, self._arrivals) if needed else None

    def _remove_hooks(self) -> None:
        self._wait_in_front(False)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuses(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of this optimizer, which is about to begin, must not be."""
        if any(optimizer is own for own in self._optimizers) or self._steps_inside():
            return False
        return any(id(parameter) in self._trained for group in optimizer.param_groups for parameter in group["params"])

    @abc.abstractmethod
    def _steps_inside(self) -> bool:
        """Whether the attached optimizer's step is under way, and another one's may be a part of it."""

    def _check_step(self) -> None:
        if self._averaging:
            raise RuntimeError("optimizer.step() inside averaged(): the step would be lost when the block ends")
        if any(parameter.requires_grad for parameter in self._frozen):
            self._refuse_unfrozen()

    def _refuse_unfrozen(self) -> None:
        frozen = {id(parameter) for parameter in self._frozen}
        names = [n for n, p in self._ddp.module.named_parameters() if id(p) in frozen and p.requires_grad]
        raise ValueError(
            f"torchext: {', '.join(names)} was frozen at torchext.attach and requires a gradient now: neither DDP nor"
            " the synchronizer shares it with the other workers; unfreeze before the model is wrapped (frozen later"
            " and unfrozen again works)"
        )


def _check_max_norm(max_norm: float) -> None:
    # A negative one would turn gradients around, NaN would be in every one of them.
    if not float(max_norm) >= 0:
        raise ValueError(
            f"Synchronizer.clip_grad_norm_: max_norm must be 0 or more, got {max_norm}; inf only measures the norm"
        )
