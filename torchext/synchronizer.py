"""Synchronizers: what :func:`torchext.attach` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext._forward_waits import FlushedMethod, ForwardWaits
from torchext._sharded_optimizer import ShardedOptimizer

__all__ = ["AveragingSynchronizer", "DearSynchronizer", "Synchronizer"]


class Synchronizer:
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
        self._waits = ForwardWaits(ddp, tensors, core.wait_tensors, core.wait_all)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def synchronize(self) -> None:
        """Makes parameters (and what else the backend averages) complete and the same on all workers, now."""
        self._check_attached("synchronize")
        self._core.synchronize()

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

    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach; what they are depends on the backend."""
        raise NotImplementedError

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
        self._core.synchronize()

    def _leave_average(self) -> None:
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


class DearSynchronizer(Synchronizer):
    """Decoupled all-reduce: every worker steps its slice of every parameter, and gathers the others' while computing.

    The model trains as with plain DDP. Parameters are complete whenever they may be read: in forward passes, in
    ``state_dict()``, ``parameters()``, ``train()`` and ``eval()`` of the model, after ``synchronize()`` and ``wait()``.
    Their own ``.grad`` is this worker's; the averaged ones are in ``optimizer.param_groups``, as slices.
    ``optimizer.state_dict()`` is collective, and that of the plain optimizer.
    """

    _core: _C.DearSynchronizer

    def __init__(
        self,
        core: _C.DearSynchronizer,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(core, ddp, optimizer, parameters)
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._shards = ShardedOptimizer(core, optimizer, parameters, ddp.process_group)
        self._synced = True  # the last forward pass was not inside no_sync()
        self._static_recorded = False
        self._handles.append(ddp.register_forward_pre_hook(self._enter_forward))
        self._handles.append(ddp.register_forward_hook(self._leave_forward, always_call=True))
        for name in ("train", "named_parameters"):
            self._handles.append(FlushedMethod(ddp.module, name, core.wait_all))
        self._follow()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:  # noqa: D102  # inherited
        self._check_attached("clip_grad_norm_")
        if self._core.allreduce:
            return super().clip_grad_norm_(max_norm, norm_type)
        slices = list(self._shards.slices())
        gradients = [gradient for gradient in (piece.grad for piece in slices) if gradient is not None and len(gradient)]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(torch.float32)
        infinite = norm_type == float("inf")
        norm = norm if infinite else norm**norm_type
        dist.all_reduce(norm, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=self._ddp.process_group)
        norm = norm if infinite else norm ** (1.0 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(slices, max_norm, norm)
        return norm

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state without gathering it, for ``torch.distributed.checkpoint``, at any world size.

        Each worker's slices are DTensors with one dimension (the parameter's elements in memory order), under
        ``"<number of the parameter>.<name of the state>"``. Load with :meth:`load_optimizer_state_dict`.
        """
        self._check_attached("optimizer_state_dict")
        return self._shards.sharded_state()

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``torch.distributed.checkpoint`` has loaded into :meth:`optimizer_state_dict`'s result."""
        self._check_attached("load_optimizer_state_dict")
        self._shards.load_sharded_state(state)

    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach.

        ``mode`` is ``"dear"`` or ``"allreduce"`` (plain DDP), ``decided`` whether it stays so. ``exposed_rs_ms`` and
        ``exposed_ag_ms`` are what training waited for reduce-scatters and all-gathers, ``rs_ms`` and ``ag_ms`` how long
        these took. ``bucket_mb`` is the limit of a bucket, ``buckets`` the bytes of each in the order of the backward
        pass, ``staging_bytes`` their memory, ``tuner`` the trials (on rank 0), ``allreduce_step_ms`` a step of plain
        DDP when it was measured.
        """
        return self._core.stats()

    def detach(self) -> None:
        """Gives the optimizer its parameters and whole state back; the model goes on as plain DDP. Safe twice."""
        if not self._detached:
            self._core.wait_all()
            self._shards.unshard()
            self._shards.remove()
        super().detach()

    def _enter_forward(self, *_: Any) -> None:
        """Keeps DDP's reducer out of the coming backward pass, but not its buffers from being broadcast."""
        ddp = self._ddp
        if not torch.is_grad_enabled():
            return
        self._synced, before = ddp.require_backward_grad_sync, self._synced
        self._core.expect_backward(self._synced)
        if not self._core.allreduce:
            ddp.require_backward_grad_sync = False
            ddp.require_forward_param_sync = before
            # With a static graph DDP would record the first backward pass, which it does not see.
            self._static_recorded, ddp._static_graph_delay_allreduce_enqueued = _static_recorded(ddp), True

    def _leave_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._core.allreduce:
            self._ddp.require_backward_grad_sync = self._synced
            self._ddp._static_graph_delay_allreduce_enqueued = self._static_recorded

    def _before_step(self, *_: Any) -> None:
        super()._before_step()
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ValueError(
                "dear: a parameter that was frozen at torchext.attach requires a gradient now, which DDP does not "
                "reduce; unfreeze before the model is wrapped (frozen later and unfrozen again works)"
            )
        self._shards.before_step()

    def _after_step(self, *_: Any) -> None:
        super()._after_step()
        self._shards.after_step()
        self._follow()

    def _follow(self) -> None:
        """Gives the optimizer slices or parameters, as the C++ side's plan wants it."""
        if self._core.allreduce:
            self._shards.unshard()
        else:
            self._shards.shard()


def _static_recorded(ddp: DistributedDataParallel) -> bool:
    return bool(getattr(ddp, "_static_graph_delay_allreduce_enqueued", False))
