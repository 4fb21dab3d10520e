"""Synchronizers: what :func:`torchext.attach` returns."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext._forward_waits import ForwardWaits

__all__ = ["AveragingSynchronizer", "Synchronizer"]


class Synchronizer(abc.ABC):
    """Keeps an attached model in step with the other workers; made by :func:`torchext.attach`.

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

    def synchronize(self) -> None:
        """Makes parameters (and what else the backend averages) complete and the same on all workers, now."""
        self._check_attached("synchronize")
        self._core.synchronize()

    def _wait_tensors(self, positions: list[int]) -> None:
        self._core.wait_tensors(positions)

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

    def wait(self) -> None:
        """Blocks until nothing is under way: for code that reads parameters between a step and the next forward."""
        self._core.wait_all()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients of the next step so that their norm is at most ``max_norm``; call it before the step.

        As ``torch.nn.utils.clip_grad_norm_``, but for the gradients that the optimizer will step with: with ``dear``
        those of all workers together (collective, exact), with a decentralized backend this worker's own.

        Returns:
            The norm before clipping, a tensor without dimensions.
        """
        self._check_attached("clip_grad_norm_")
        return torch.nn.utils.clip_grad_norm_(self._ddp.module.parameters(), max_norm, norm_type)

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach; what they are depends on the backend."""

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position, for checkpoints."""
        return {"version": 1, "steps": self._core.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; the same on all ranks."""
        if state.get("version") != 1:
            raise ValueError(f"Synchronizer.load_state_dict: version must be 1, got {state.get('version')!r}")
        self._core.steps = int(state["steps"])

    def detach(self) -> None:
        """Ends taking part: gradients stay local and nothing is exchanged any more. Safe twice."""
        if self._detached:
            return
        self._detached = True
        self._remove_hooks()
        self._core.detach()

    def _enter_average(self) -> None:
        self.synchronize()

    def _leave_average(self) -> None:  # noqa: B027  # nothing to restore where replicas do not differ
        pass

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

    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach.

        ``exposed_ms`` is what training waited; ``generator_wait_ms``, ``peer_wait_ms``, ``transfer_ms`` and ``copy_ms``
        are the averaging thread's, most of it under compute. ``group_sizes`` maps members to averages,
        ``iteration_gap`` is how many averages this worker was behind the fastest, ``consensus_distance`` is
        ``||x - mean|| / ||mean||`` at the last exact average, ``bytes_sent`` and ``bucket_bytes`` are bytes.
        """
        return self._core.stats()

    def _enter_average(self) -> None:
        self._core.enter_average()

    def _leave_average(self) -> None:
        self._core.leave_average()
