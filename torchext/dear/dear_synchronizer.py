"""The synchronizer of a model that is trained by "dear"."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of
from torchext.base.eager_only import eager_only
from torchext.ddp.forward_hooks import Hook, OutputHook, tensors_in
from torchext.ddp.shared_memory import SharedMemory
from torchext.ddp.step_round import StepRound
from torchext.ddp.synchronizer import Synchronizer, _check_max_norm
from torchext.dear.dear_parameters import DearParameters
from torchext.dear.dear_state import DearState
from torchext.dear.dear_step import DearStep
from torchext.dear.deferred_step import DeferredStep
from torchext.dear.sharded_gradients import ShardedGradients
from torchext.dear.state_loading import split_by_owner

__all__ = ["DearSynchronizer", "DedicatedGroup"]


class DedicatedGroup:
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
            pg_options=options,  # it goes by the same heartbeats, checks and limits
            use_local_synchronization=True,
            group_desc="torchext_dear_dedicated",
        )
        assert isinstance(group, dist.ProcessGroup)  # its ranks are those that call this
        self._group = group
        dedicated_group = backend_of(group)
        assert isinstance(dedicated_group, _C.ProcessGroupDear)
        return dedicated_group

    def close(self) -> None:
        """Ends it, unless all groups have been destroyed already. Safe twice."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the group is not known any more
                dist.destroy_process_group(group)


class DearSynchronizer(Synchronizer):
    """Decoupled all-reduce: gradients are reduced under the backward pass, and gathered under the next forward pass.

    The model trains as with plain DDP. Whatever operation uses a parameter that is still on its way waits for it first.
    Between a backward pass outside ``no_sync()`` and the step ``parameter.grad`` is the averaged gradient.
    A step with gradients that were not averaged raises RuntimeError.
    Under ``torch.compile`` the optimizer's step runs as it is, not compiled: its gradients are waited for one by one.

    Sharded form: every worker steps its slice of every parameter, and gathers the others'; ``optimizer.state_dict()``
    is collective, and that of the plain optimizer. ``parameter.grad`` is in slices, too: what is done to each element
    by itself, and norms, work on these, anything else gathers it and is collective. After the step it is this worker's
    own. Replicated form: every worker steps every parameter, right before it is used.
    """

    _core: _C.DearSynchronizer

    def __init__(
        self,
        core: _C.DearSynchronizer,
        ddp: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[nn.Parameter],
        dedicated_group: DedicatedGroup | None = None,
        apart: Collection[int] = (),
    ) -> None:
        self._parameters = DearParameters(core, parameters, ddp.process_group, self._wait_tensors, apart)
        super().__init__(core, ddp, optimizers, self._parameters)
        self._apart = apart  # positions of parameters that others average, and that every rank steps whole
        self._trained |= {id(parameters[position]) for position in apart}
        self._dedicated_group = dedicated_group
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        named = [names[id(parameter)] for parameter in parameters]
        self._round = StepRound(self._optimizers, self._begin_round, self._end_round)
        # Of each optimizer:
        self._states: list[DearState] = []
        self._deferred: list[DeferredStep] = []
        self._steps: list[DearStep] = []
        for optimizer in self._optimizers:
            own = functools.partial(self._positions_of, optimizer)
            state = DearState(core, optimizer, parameters, ddp.process_group, apart)
            deferred = DeferredStep(core, optimizer, self._parameters, named, self.wait, own)
            begins = functools.partial(self._before_step, optimizer)
            ends = functools.partial(self._after_step, optimizer)
            self._steps.append(DearStep(core, optimizer, self._parameters, state, deferred, own, begins, ends))
            self._states.append(state)
            self._deferred.append(deferred)
            self._handles += [
                optimizer.register_state_dict_pre_hook(lambda _: self.wait()),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self.wait()),
            ]
        self._memory = SharedMemory(parameters)
        self._synced = True  # the last forward pass was not inside no_sync()
        self._in_forward = False  # a forward pass has begun, in which DDP's reducer is kept out
        self._static_recorded = False
        self._reduced = True  # DDP's reducer has averaged gradients so far
        core.on_reduced(_weakly(self._parameters, DearParameters.reduced))
        if self._sharded:
            core.on_accumulating(_weakly(self._parameters.averaged, ShardedGradients.accumulating))
        self._handles += [
            ddp.register_forward_pre_hook(Hook(self._enter_forward)),
            ddp.register_forward_hook(OutputHook(self._leave_forward), always_call=True),
        ]
        self._follow()

    def wait(self) -> None:  # inherited
        self._core.wait_all()
        for deferred in self._deferred:
            deferred.finish()
        self._parameters.values_arrived()

    def _synchronize(self) -> None:
        self._round.close()
        super()._synchronize()
        self.wait()  # for the deferred step

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:  # inherited
        self._check_attached("clip_grad_norm_")
        _check_max_norm(max_norm)
        stepped = [
            parameter
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if self._parameters.position_of(parameter) is not None
        ]
        if max_norm == float("inf"):  # it is measured only, and may be in any pass
            gradients = [gradient for parameter in stepped if (gradient := parameter.grad) is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        return torch.nn.utils.clip_grad_norm_(stepped, max_norm, norm_type)

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
        return {key: value for state in self._states for key, value in state.sharded_state().items()}

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
        if len(self._states) == 1:
            self._states[0].take(self._states[0].agreed(state))
            return
        own = [self._positions_of(optimizer) or () for optimizer in self._optimizers]
        parts = split_by_owner(state, own)
        agreed = [of_one.agreed(part) for of_one, part in zip(self._states, parts, strict=True)]
        for of_one, values in zip(self._states, agreed, strict=True):
            of_one.take(values)

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
            self._round.close()
            self.wait()
            self._parameters.averaged.restore()  # which DDP would have averaged by now
            for state in self._states:
                state.hold(whole=True)
        except BaseException:
            for deferred, state in zip(self._deferred, self._states, strict=True):
                deferred.remove()
                state.forget()
            raise
        finally:
            self._give_back()
            try:
                super().detach()
            finally:
                if self._dedicated_group is not None:
                    self._dedicated_group.close()

    def _abandon(self) -> None:  # inherited
        if any(state.is_sliced for state in self._states):
            raise ValueError(
                "torchext.attach: the state of this optimizer is in slices, which the ranks of a group had that has "
                "been destroyed; call sync.detach() before destroy_process_group(), which makes it whole, or make a "
                "new optimizer and load a checkpoint"
            )
        with contextlib.suppress(dist.DistBackendError):  # of a step that has not been finished
            self.wait()
        self._give_back()
        super()._abandon()
        if self._dedicated_group is not None:
            self._dedicated_group.close()

    def _give_back(self) -> None:
        """Frees model and optimizer."""
        for deferred, step, state in zip(self._deferred, self._steps, self._states, strict=True):
            deferred.remove()
            step.remove()
            state.remove()
        self._parameters.averaged.drop()

    @property
    def _sharded(self) -> bool:
        return not self._core.replicated

    def _trains(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of them is a parameter of its model."""
        return any(self._parameters.position_of(parameter) is not None for parameter in parameters)

    def _detach_core(self) -> None:
        try:
            self._core.detach()
        except dist.DistBackendError:
            self._core.leave(timedelta(0))
            raise

    def _enter_forward(self) -> None:
        """Keeps DDP's reducer out of the coming backward pass; its buffers are broadcast when DDP would."""
        ddp = self._ddp
        if not torch.is_grad_enabled():
            return
        self._round.close()  # one of several optimizers has been left out
        if ddp._comm_hooks:
            raise RuntimeError(
                "dear: register_comm_hook on an attached model: gradients would pass by the communication hook"
            )
        if ddp._join_config.enable:
            raise RuntimeError(
                "dear: DistributedDataParallel.join() is not supported: a rank that has no more inputs would have to "
                "answer exchanges that DDP does not see; give all ranks as many (DistributedSampler does)"
            )
        if self._in_forward:  # it has ended with what hooks are not called for, KeyboardInterrupt say
            self._give_reducer_back()
        self._synced = ddp.require_backward_grad_sync
        self._core.wait_tensors([])  # raises where the group has failed
        self._parameters.averaged.before_pass()
        if not self._sharded and not self._steps_inside() and self._core.adopt_plan():  # this rank has skipped a step
            self._follow()
        self._core.expect_backward(self._synced)
        if not self._core.allreduce:
            ddp.require_backward_grad_sync = False
            # With a static graph DDP would record the first backward pass, which it does not see.
            self._static_recorded, ddp._static_graph_delay_allreduce_enqueued = _static_recorded(ddp), True
            self._in_forward = True

    def _leave_forward(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._watch_backward(output)
        if not self._core.allreduce:
            self._give_reducer_back()
            if self._core.replicated:
                self.wait()  # for parameters that this forward pass did not use: the coming backward pass takes over

    def _give_reducer_back(self) -> None:
        """What :meth:`_enter_forward` has told DDP's reducer is over."""
        self._in_forward = False
        self._ddp.require_backward_grad_sync = self._synced
        self._ddp.require_forward_param_sync = self._synced  # the next forward pass, of any kind, goes by it
        self._ddp._static_graph_delay_allreduce_enqueued = self._static_recorded

    @eager_only("dear looks at the outputs of forward passes")
    def _watch_backward(self, output: Any) -> None:
        """Tells the C++ side when the outermost backward pass begins, of which activation checkpoints are parts."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if tensors:
            core = self._core
            register_multi_grad_hook(tensors, lambda _: core.backward_begins(), mode="any")

    def _steps_inside(self) -> bool:
        under_way = any(step.under_way for step in self._steps) or any(step.running for step in self._deferred)
        return self._core.replicated and under_way

    def _positions_of(self, optimizer: torch.optim.Optimizer) -> set[int] | None:
        """Of the parameters that one of several optimizers steps; None: there is one, and all are its."""
        if len(self._optimizers) == 1:
            return None
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return {position for p in held if (position := self._parameters.position_of(p)) is not None}

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and self._parameters.position_of(parameter) is None:
                    raise ValueError(
                        "dear: the optimizer has been given a parameter after torchext.attach; add parameters to model "
                        "and optimizer first, then wrap and attach"
                    )
        self._round.begins(optimizer)

    def _begin_round(self) -> None:
        self._core.before_step()
        for deferred in self._deferred:
            deferred.finish()
        moved = self._core.take_moved()
        for state in self._states:
            state.parts.moved(moved)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._core.allreduce and not self._reduced:
            self._parameters.expect_values(self._positions_of(optimizer))
        self._round.ends(optimizer)

    def _end_round(self) -> None:
        if len(self._optimizers) > 1:
            self._parameters.averaged.settle_all()  # of those left out
        self._core.after_step()
        if self._sharded and not self._core.allreduce and not self._reduced:
            self._parameters.expect_values()  # all are gathered, whoever has stepped
        if not self._reduced and (held := self._memory_of_scripts()):
            self._parameters.arrive_all(held)
        with torch.inference_mode(False):  # of who calls the step: state may be made anew
            self._follow()

    def _memory_of_scripts(self) -> list[int]:
        """The positions of parameters whose memory a script has kept, who reads it without asking."""
        own = [int(self._core.bucket_count > 0)] * len(self._memory)
        for position in self._apart:
            own[position] += 1  # what stands for it on the C++ side
        for state in self._states:
            for position in state.parts.positions:
                own[position] += 1  # a slice
        return self._memory.held_by_others(own)

    def _wait_tensors(self, positions: list[int]) -> None:
        if self._sharded and self._round.is_partial:
            raise RuntimeError(
                "dear: parameters are read after the step of one attached optimizer and before those of the others, and"
                " in the sharded form they are gathered behind the last; step all optimizers first, or take "
                "DeAROptions(form='replicated')"
            )
        self._core.wait_tensors(positions)
        for deferred in self._deferred:
            deferred.apply(positions)

    def _follow(self) -> None:
        """Has DDP's reducer and the optimizer's state be what the C++ side's plan wants."""
        allreduce = self._core.allreduce
        if allreduce:
            self.wait()
        elif self._reduced:
            # After a forward pass without a backward pass it is awake, and would take part in the next one.
            self._ddp.reducer._reset_state()
        self._reduced = allreduce
        self._wait_in_front(not allreduce)
        for state in self._states:
            state.hold(whole=allreduce)


def _weakly(owner: Any, method: Callable[[Any], None]) -> Callable[[], None]:
    """The method for the C++ side, which does not keep its owner alive."""
    reference = weakref.ref(owner)

    def call() -> None:
        alive = reference()
        if alive is not None:
            method(alive)

    return call


def _static_recorded(ddp: DistributedDataParallel) -> bool:
    return bool(getattr(ddp, "_static_graph_delay_allreduce_enqueued", False))
