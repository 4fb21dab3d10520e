"""The synchronizer of a model that is trained by "dear"."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext._dear_optimizer import DearOptimizer
from torchext._deferred_step import DeferredStep
from torchext._forward_waits import FlushedCopies, FlushedMethod, _Hook, _OutputHook
from torchext._gradient_watch import GradientWatch
from torchext._step_hooks import after_step
from torchext._uncompiled import UncompiledStep
from torchext.backends import backend_of
from torchext.synchronizer import Synchronizer, _check_max_norm

__all__ = ["DearSynchronizer", "Lane"]


class Lane:
    """A group of the same ranks as a model's, for the collectives of its exchange thread and nothing else.

    Their order among the user's own collectives would not be the same on all ranks; NCCL needs one order in a
    communicator.
    """

    def __init__(self, beside: dist.ProcessGroup) -> None:
        self._beside = beside
        self._group: dist.ProcessGroup | None = None

    def make(self) -> _C.ProcessGroupDear:
        """Makes it; collective among its ranks only."""
        options = backend_of(self._beside).options
        group = dist.new_group(
            dist.get_process_group_ranks(self._beside),
            timeout=options._timeout,
            backend="dear",
            use_local_synchronization=True,
            group_desc="torchext_dear_lane",
        )
        assert isinstance(group, dist.ProcessGroup)  # its ranks are those that call this
        self._group = group
        lane = backend_of(group)
        assert isinstance(lane, _C.ProcessGroupDear)
        return lane

    def close(self) -> None:
        """Ends it, unless all groups have been destroyed already. Safe twice."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the group is not known any more
                dist.destroy_process_group(group)


class DearSynchronizer(Synchronizer):
    """Decoupled all-reduce: gradients are reduced under the backward pass, and gathered under the next forward pass.

    The model trains as with plain DDP. Parameters are complete whenever they may be read: in forward passes (a module's
    from when it is called), in ``state_dict()``, ``load_state_dict()``, ``parameters()``, ``train()`` and ``eval()`` of
    the model, after ``synchronize()`` and ``wait()``.
    Their own ``.grad`` is this worker's, and not to be changed; the averaged ones are in ``optimizer.param_groups``.
    A step without gradients that were averaged since the last one raises RuntimeError.
    Under ``torch.compile`` the optimizer's step runs as it is, not compiled: its gradients are waited for one by one.

    Sharded form: every worker steps its slice of every parameter, and gathers the others'; ``optimizer.state_dict()``
    is collective, and that of the plain optimizer. Replicated form: every worker steps every parameter, right before it
    is needed.
    """

    _core: _C.DearSynchronizer

    def __init__(
        self,
        core: _C.DearSynchronizer,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        lane: Lane | None = None,
    ) -> None:
        super().__init__(core, ddp, optimizer, parameters)
        self._lane = lane
        own = {id(parameter) for parameter in parameters}
        named = {name: parameter for name, parameter in ddp.module.named_parameters() if id(parameter) in own}
        self._watch = GradientWatch(named, core.backward_begins)
        self._held = DearOptimizer(core, optimizer, parameters, ddp.process_group, self.wait, self._watch)
        self._deferred: DeferredStep | None = None
        self._synced = True  # the last forward pass was not inside no_sync()
        self._static_recorded = False
        self._reduced = True  # DDP's reducer has averaged gradients so far
        self._settled = False  # plain all-reduce from now on
        self._unsent = False  # the optimizer's step is over, and what it has made stays here so far
        stepped = after_step(optimizer, self._stepped)
        # In front of hooks that were there before.
        optimizer._optimizer_step_post_hooks.move_to_end(stepped.id, last=False)  # type: ignore[attr-defined]
        self._handles += [
            stepped,
            UncompiledStep(optimizer),
            ddp.register_forward_pre_hook(_Hook(self._enter_forward)),
            ddp.register_forward_hook(_OutputHook(self._leave_forward), always_call=True),
            optimizer.register_state_dict_pre_hook(lambda _: self.wait()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.wait()),
            *(FlushedMethod(module, name, self.wait) for module in ddp.modules() for name in _LOOKING),
            *(FlushedCopies(module, self.wait) for module in ddp.modules()),
            # Or what is on its way would undo what is loaded.
            *(module.register_load_state_dict_pre_hook(_Hook(self.wait)) for module in ddp.modules()),  # type: ignore[no-untyped-call]
        ]
        self._follow()

    def wait(self) -> None:  # inherited
        self._send()
        self._core.wait_all()
        if self._deferred is not None:
            self._deferred.finish()

    def _synchronize(self) -> None:
        super()._synchronize()
        self.wait()  # for the deferred step

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:  # inherited
        self._check_attached("clip_grad_norm_")
        _check_max_norm(max_norm)
        stepped = list(self._held.stepped())
        if self._core.allreduce or self._core.gathered:
            whole = [gradient for parameter in stepped if (gradient := parameter.grad) is not None]
            norm = torch.nn.utils.get_total_norm(whole, norm_type)
            torch.nn.utils.clip_grads_with_norm_(stepped, max_norm, norm)
            return norm
        own = (self._core.own_gradient(parameter.position) for parameter in stepped if not parameter.dropped)
        gradients = [gradient for gradient in own if gradient is not None and len(gradient)]
        # By the parameters: a rank may have no gradients.
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in stepped), torch.float32)
        norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(stepped[0].device, dtype)
        infinite = norm_type == float("inf")
        norm = norm if infinite else norm**norm_type
        dist.all_reduce(norm, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=self._ddp.process_group)
        norm = norm if infinite else norm ** (1.0 / norm_type)
        scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        if scale != 1 or max_norm != float("inf"):  # else it is measured only, and may be in any pass
            for gradient in gradients:
                gradient.mul_(scale)
        return norm

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state without gathering it, for ``torch.distributed.checkpoint``, at any world size.

        In the sharded form each worker's slices are DTensors with one dimension (the parameter's elements in memory
        order), under ``"<number of the parameter>.<name of the state>"``. Load with :meth:`load_optimizer_state_dict`.
        Before the first step it has what that step will create, to load into; parameters without state in the
        checkpoint (never used) then need ``DefaultLoadPlanner(allow_partial_load=True)``.

        Raises:
            RuntimeError: After :meth:`detach` or inside :meth:`averaged`; before the first step of an optimizer of
                which it is not known what that will create.
            torch.distributed.DistBackendError: As :meth:`wait`.
        """
        self._check_attached("optimizer_state_dict")
        self.wait()
        return self._held.state.sharded_state()

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``torch.distributed.checkpoint`` has loaded into :meth:`optimizer_state_dict`'s result.

        Collective: every rank loads its own, or, where one rank's is refused, none does. Parameters that the state has
        nothing of keep theirs.

        Raises:
            TypeError: it is no mapping.
            ValueError: a key or a shape is not this model's, with the key; or keys differ between ranks.
            RuntimeError: another rank has refused its own; after :meth:`detach` or inside :meth:`averaged`.
            torch.distributed.DistBackendError: the group has failed; as :meth:`wait`, which comes first.
        """
        self._check_attached("load_optimizer_state_dict")
        self.wait()
        self._held.state.load_sharded_state(state)

    def stats(self) -> dict[str, Any]:
        """Counters and milliseconds since attach.

        ``mode`` is ``"dear"`` or ``"allreduce"`` (plain DDP), ``decided`` whether the search is over.
        ``exposed_rs_ms`` and ``exposed_ag_ms`` are what training waited for reduce-scatters and all-gathers, ``rs_ms``
        and ``ag_ms`` how long these took. ``bucket_mb`` is the limit of a bucket, ``buckets`` the bytes of each in the
        order of the backward pass, ``staging_bytes`` their memory, ``tuner`` the trials (on rank 0; ``noise``: relative
        standard deviation of ``step_ms``), ``allreduce_step_ms`` a step of plain DDP when it was measured.
        """
        return self._core.stats()

    def detach(self) -> None:
        """Gives the optimizer its parameters and whole state back; the model goes on as plain DDP. Safe twice.

        After the loss of a worker it raises, but model and optimizer are free all the same. Parameters may be those of
        two steps then, and the optimizer has no state: load both from a checkpoint.

        Raises:
            torch.distributed.DistBackendError: The group has failed.
        """
        if self._detached:
            return
        try:
            self.wait()
            self._release()
        finally:
            self._release(with_state=False)  # where that failed
            self._held.remove()
            try:
                super().detach()
            finally:
                if self._lane is not None:
                    self._lane.close()

    @property
    def _sharded(self) -> bool:
        return not self._core.replicated

    def _trains(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of them is a parameter of its model. Waits for nothing, as asking the model would."""
        return any(self._held.state.has(parameter) for parameter in parameters)

    def _detach_core(self) -> None:
        try:
            self._core.detach()
        except dist.DistBackendError:
            self._core.leave(timedelta(0))
            raise

    def _enter_forward(self, *_: Any) -> None:
        """Keeps DDP's reducer out of the coming backward pass; its buffers are broadcast when DDP would."""
        ddp = self._ddp
        if not torch.is_grad_enabled():
            return
        if ddp._comm_hooks:
            raise RuntimeError(
                "dear: register_comm_hook on an attached model: gradients would pass by the communication hook"
            )
        if ddp._join_config.enable:
            raise RuntimeError(
                "dear: DistributedDataParallel.join() is not supported: a rank that has no more inputs would have to "
                "answer exchanges that DDP does not see; give all ranks as many (DistributedSampler does)"
            )
        self._synced = ddp.require_backward_grad_sync
        self._core.expect_backward(self._synced)
        if self._synced:
            self._held.expect_backward()
        if not self._core.allreduce:
            ddp.require_backward_grad_sync = False
            # With a static graph DDP would record the first backward pass, which it does not see.
            self._static_recorded, ddp._static_graph_delay_allreduce_enqueued = _static_recorded(ddp), True
        elif ddp.gradient_as_bucket_view:
            self._watch.enter_forward()

    def _leave_forward(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._watch.leave_forward()
        self._watch.follow(output, self._synced)
        if not self._core.allreduce:
            self._ddp.require_backward_grad_sync = self._synced
            self._ddp.require_forward_param_sync = self._synced  # the next forward pass, of any kind, goes by it
            self._ddp._static_graph_delay_allreduce_enqueued = self._static_recorded
            if self._deferred is not None:
                self._deferred.finish()  # with parameters that this forward pass did not use

    def _before_step(self, *_: Any) -> None:
        self._send()  # after a hook that raised
        # Behind hooks that were registered since.
        self._optimizer._optimizer_step_post_hooks.move_to_end(self._after_step_hook.id)  # type: ignore[attr-defined]
        if self._deferred is not None:
            self._deferred.finish()
        super()._before_step()
        self._held.before_step()

    def _stepped(self, *_: Any) -> None:
        self._unsent = True
        self._held.step_ends()

    def _after_step(self, *_: Any) -> None:
        self._send()

    def _send(self) -> None:
        """Ends a step that is over: behind all hooks that may write what is sent, or when the first of them reads."""
        if not self._unsent:
            return
        self._unsent = False
        self._held.check_gradients()  # of a closure
        with torch.inference_mode(False):  # of who reads: state may be made anew
            super()._after_step()
            self._held.after_step()
            self._follow()

    def _wait_tensors(self, positions: list[int]) -> None:
        self._send()
        self._core.wait_tensors(positions)
        if self._deferred is not None:
            self._deferred.apply(positions)

    def _follow(self) -> None:
        """Gives the optimizer what it is to step, as the C++ side's plan wants it."""
        allreduce = self._core.allreduce
        if allreduce:
            self.wait()
            self._step_at_once()
            if not self._settled and self._core.stats()["decided"]:
                self._settled = True
                self._waits.end_forward()
        elif self._reduced:
            # After a forward pass without a backward pass it is awake, and would take part in the next one.
            self._ddp.reducer._reset_state()
        self._reduced = allreduce
        self._held.hold()
        if self._core.replicated and not allreduce and self._deferred is None:
            self._deferred = DeferredStep(self._optimizer, self._held.has_gradients, self._held.deferred)

    def _step_at_once(self) -> None:
        if self._deferred is not None:
            self._deferred.remove()
            self._deferred = None

    def _release(self, with_state: bool = True) -> None:
        self._step_at_once()
        self._held.release(with_state)


# Methods of modules after which a script may read parameters, or has looked them up to do so.
_LOOKING = ("train", "named_parameters")


def _static_recorded(ddp: DistributedDataParallel) -> bool:
    return bool(getattr(ddp, "_static_graph_delay_allreduce_enqueued", False))
