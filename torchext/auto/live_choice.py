"""The backend ``torchext``: the first steps of a DDP model are measured, and it goes on by the fastest exact way."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torchext.auto.all_ranks import check_same, device_of, errors_on_all, gathered
from torchext.auto.apply import told_of
from torchext.auto.candidates import Candidate, search
from torchext.auto.explanation import described
from torchext.auto.link_model import LinkModel, calibrate
from torchext.auto.model_profile import Profile
from torchext.auto.step_marks import Marks, StepMarks
from torchext.auto.step_profile import merged
from torchext.auto.step_watch import StepWatch
from torchext.auto.sync_plan import SyncPlan, plan_of, planned_by_first, why_no_dear
from torchext.backends import backend_of
from torchext.base.eager_only import eager_only
from torchext.ddp.averaged_apart import averaged_apart
from torchext.ddp.forward_hooks import Hook
from torchext.ddp.plain_synchronizer import PlainSynchronizer
from torchext.ddp.reduced_passes import ReducedPasses
from torchext.ddp.step_hooks import after_step, before_step
from torchext.ddp.synchronizer import Synchronizer
from torchext.dear.dear_attachment import prepare_planned, why_not_dear
from torchext.dear.dear_synchronizer import DearSynchronizer

__all__ = ["AutoSynchronizer", "attach_choosing"]

_CALLER = "torchext.attach"
_WARM_UP_STEPS = 3
_MEASURED_STEPS = 5
_BEFORE = _WARM_UP_STEPS + _MEASURED_STEPS
# What DistributedDataParallel is made with, and keeps.
_FIXED_IN_DDP = {
    "ddp program": "not possible: the buckets of this DDP model are fixed; plan.apply makes one with the plan's",
    "factors": "not possible: this DDP model averages all gradients itself; plan.apply makes one that leaves some out",
}
_logger = logging.getLogger("torchext")


def attach_choosing(ddp: DistributedDataParallel, optimizers: tuple[torch.optim.Optimizer, ...]) -> AutoSynchronizer:
    """What :func:`torchext.attach` does with a model on the backend ``torchext``. Collective.

    Args:
        ddp: The model, checked.
        optimizers: Its own, checked.
    """
    group = ddp.process_group
    link: LinkModel | None = None
    options: Any = backend_of(group).options
    if group.size() > 1:
        with errors_on_all(_CALLER, group):
            if options.bucket_mb != "auto":
                raise ValueError(
                    f"{_CALLER}: the group's DeAROptions have bucket_mb={options.bucket_mb!r}, and the backend "
                    "'torchext' chooses buckets by itself; leave it out, or make the group with backend='dear'"
                )
            device = device_of(_CALLER, group, _device(ddp.module))
        check_same(_CALLER, group, told_of(ddp.module) | {"form": options.form}, kind=dist.DistBackendError)
        link = calibrate(group, device=device)
    synchronizer = AutoSynchronizer(ddp, optimizers, link, options.form, options.transport)
    ddp._torchext_synchronizer = synchronizer  # type: ignore[assignment]  # typed as a submodule
    return synchronizer


class AutoSynchronizer(PlainSynchronizer):
    """Trains as plain DDP for 8 steps, 5 of which are measured, and then by the fastest exact way.

    :func:`torchext.attach` returns it for models on the backend ``torchext``, and has measured the links. A step is
    here a backward pass in which DDP averages: these all ranks make equally often and in one order. At the end of the
    eighth rank 0 plans for all ranks. Plain DDP stays unless ``dear`` is predicted to be faster by more than 3 %, even
    if all-reduce is faster by what two calibrations differ by. ``dear`` takes over in front of the next forward pass,
    or behind the step whose closure has made the eighth pass. It compares its buckets with plain all-reduce in 77
    steps, and stays if these are measured faster. The model is that of plain DDP throughout.

    ``stats()`` are those of what trains: of plain DDP ``steps``, ``mode`` and ``decided``; else of ``dear``.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: tuple[torch.optim.Optimizer, ...],
        link: LinkModel | None,
        form: str,
        transport: str,
    ) -> None:
        super().__init__(ddp, optimizers)
        self._link, self._form, self._transport = link, form, transport
        self._plan: SyncPlan | None = None
        self._reason = ""  # why there is no plan, when it is decided
        self._decided = False
        self._switch: Callable[[], DearSynchronizer] | None = None  # to dear, which is decided and still to come
        self._dear: DearSynchronizer | None = None  # trains the model since the switch
        self._reduced = 0  # backward passes in which DDP has averaged
        self._begun = False  # the pass that is the next of them
        self._recorder: _Recorder | None = None
        own = weakref.ref(self)

        @eager_only("torchext: the first steps of a model are measured")
        def enter() -> None:
            alive = own()
            if alive is not None:
                alive._enter_forward()

        self._entering: RemovableHandle = ddp.register_forward_pre_hook(Hook(enter))
        self._passes = ReducedPasses(ddp, self._pass_reduced)
        self._steps = _Steps(optimizers)
        self._handles += self._steps.handles

    @property
    def plan(self) -> SyncPlan | None:
        """What was decided, and all that was considered; None until then, and where the steps could not be measured."""
        return self._plan

    @property
    def dear(self) -> DearSynchronizer | None:
        """What trains the model by ``dear``, with its calls for sharded checkpoints; None where plain DDP does."""
        return self._dear

    def explain(self) -> str:
        """What was measured, every candidate and why it lost; before that how far it is."""
        if self._plan is not None:
            return self._plan.explain()
        if self._decided:
            return f"plain DDP: {self._reason}"
        return f"not decided yet: {self._reduced} of {_BEFORE} steps"

    def synchronize(self) -> None:  # noqa: D102  # inherited
        if self._dear is not None:
            self._dear.synchronize()
        else:
            super().synchronize()

    @contextlib.contextmanager
    def averaged(self, *, optimizer_state: bool = True) -> Iterator[nn.Module]:  # noqa: D102  # inherited
        average = super().averaged if self._dear is None else self._dear.averaged
        with average(optimizer_state=optimizer_state) as module:
            yield module

    def wait(self) -> None:  # noqa: D102  # inherited
        if self._dear is not None:
            self._dear.wait()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:  # noqa: D102  # inherited
        if self._dear is not None:
            return self._dear.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(max_norm, norm_type)

    def stats(self) -> dict[str, Any]:  # noqa: D102  # inherited
        if self._dear is not None:
            return self._dear.stats()
        return super().stats() | {"decided": self._decided}

    def state_dict(self) -> dict[str, Any]:  # noqa: D102  # inherited
        return super().state_dict() if self._dear is None else self._dear.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102  # inherited
        if self._dear is not None:
            self._dear.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def detach(self) -> None:
        """The model goes on as plain DDP, also where nothing has been decided yet. Safe twice.

        Raises:
            torch.distributed.DistBackendError: As :meth:`torchext.DearSynchronizer.detach`.
        """
        self._stop_measuring()
        try:
            self._take_over()
            if self._dear is not None:
                self._dear.detach()
        finally:
            super().detach()

    def _may_exchange(self) -> bool:
        return Synchronizer._is_active(self)  # once it has switched

    def _check_attached(self, what: str) -> None:
        super()._check_attached(what)
        group = self._ddp.process_group
        if group not in dist.distributed_c10d._world.pg_map:
            raise RuntimeError(f"Synchronizer.{what}: the process group has ended; call it before, or detach()")
        failure = backend_of(group).failure[1]
        if failure:
            raise dist.DistBackendError(f"torchext: the group of an attached model has failed: {failure}")

    def _enter_forward(self) -> None:
        if self._averaging or not torch.is_grad_enabled():
            return
        if self._switch is not None:
            self._take_over()
            assert self._dear is not None
            self._dear._enter_forward()  # of the pass that has begun; its hook is called from the next one on
        elif self._ddp._join_config.enable:  # a rank without inputs would answer nothing of what comes
            self._settle("DistributedDataParallel.join() is in use")
        elif not self._begun:
            self._begun = True
            if self._reduced == _WARM_UP_STEPS:
                self._recorder = _Recorder(self._ddp.module)
            if self._recorder is not None:
                self._recorder.begin()

    def _pass_reduced(self) -> None:
        """At the end of a backward pass in which DDP has averaged."""
        self._reduced += 1
        self._begun = False
        if self._reduced == _BEFORE:
            self._decide()

    def _decide(self) -> None:
        """Collective."""
        recorder, group = self._recorder, self._ddp.process_group
        assert recorder is not None  # since the warm-up
        with errors_on_all(_CALLER, group):
            own = recorder.profile()
        profiles, taken = zip(*gathered(group, (own, self._steps.taken)), strict=True)
        if self._form == "sharded" and any(steps != taken[0] for steps in taken):  # there all step, or none
            self._settle("ranks have taken different numbers of steps")
            return
        known = [profile for profile in profiles if profile is not None]
        if len(known) < len(profiles):
            self._settle("a measured step left no gradients")
            return
        try:
            profile = merged(_CALLER, known)
        except ValueError:  # on all ranks
            self._settle("ranks have gradients of different parameters")
            return
        plan = self._planned(profile)
        if plan.chosen is not None:
            self._follow_plan(plan, plan.chosen)
        self._plan = plan
        self._settle("")

    def _planned(self, profile: Profile) -> SyncPlan:
        if self._link is None:
            return plan_of(profile, None, ())
        link, group = self._link, self._ddp.process_group
        why = why_no_dear(self._ddp.module) or why_not_dear(self._ddp, self._optimizers, self._form)
        if averaged_apart(self._ddp):  # of which the profile has no gradients
            why = "layers send rows already; plan.apply weighs these against dear"
        why = next(filter(None, gathered(group, why)), "")
        other = "replicated" if self._form == "sharded" else "sharded"
        refused = _FIXED_IN_DDP | {f"dear {other}": f"not possible: form is {self._form!r}"}
        if why:
            refused["dear"] = f"not possible: {why}"
        if self._transport != "auto":  # which follows the plan
            other = "ring" if self._transport == "hierarchical" else "hierarchical"
            refused[f"dear {other}"] = f"not possible: transport is {self._transport!r}"

        def candidates() -> list[Candidate]:
            return search(profile, link, listed=(), allow=("exact",), refused=refused)

        return planned_by_first(_CALLER, group, profile, link, candidates)

    def _follow_plan(self, plan: SyncPlan, chosen: Candidate) -> None:
        """Collective."""
        speaks = self._ddp.process_group.rank() == 0
        if chosen.way == "dear":
            self._switch = prepare_planned(self._ddp, self._optimizers, plan)
            if self._steps.under_way:  # its closure has made this pass
                self._steps.then = self._take_over
        if speaks:
            _logger.info("torchext: trains by %s", described(plan.profile, chosen))
        StepWatch(self, self._optimizers[0], chosen.step_seconds, speaks=speaks)

    def _take_over(self) -> None:
        """Has ``dear`` train from now on, between two steps, if that is decided. Not collective."""
        switch, self._switch = self._switch, None
        self._entering.remove()
        if switch is not None:
            self._dear = switch()
            self._dear._core.steps = self._core.steps

    def _settle(self, reason: str) -> None:
        self._decided, self._reason = True, reason
        self._stop_measuring()
        if self._switch is None:
            self._entering.remove()
        if reason and self._ddp.process_group.rank() == 0:
            _logger.info("torchext: trains by plain DDP: %s", reason)

    def _stop_measuring(self) -> None:
        self._passes.remove()
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None


class _Steps:
    """Counts the steps of each optimizer, and knows whether one is under way."""

    def __init__(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self.taken = [0] * len(optimizers)
        self.under_way = False
        self.then: Callable[[], None] | None = None  # called once, behind the step that is under way
        self.handles: list[RemovableHandle] = []
        for place, optimizer in enumerate(optimizers):
            self.handles.append(before_step(optimizer, self._begin))
            self.handles.append(after_step(optimizer, functools.partial(self._end, place)))

    @eager_only("torchext: steps are counted")
    def _begin(self, *_: Any) -> None:
        self.under_way = True

    @eager_only("torchext: steps are counted")
    def _end(self, place: int, *_: Any) -> None:
        self.taken[place] += 1
        self.under_way = False
        then, self.then = self.then, None
        if then is not None:
            then()


class _Recorder:
    """Marks the steps of the script's own training."""

    def __init__(self, model: nn.Module) -> None:
        self._marks = StepMarks(model, own_steps=False)
        self._steps: list[Marks] = []
        self._pending = False  # the root's forward pass begins a step
        self._handles = self._marks.hooks()
        self._handles.append(model.register_forward_pre_hook(Hook(self._enter_root), prepend=True))  # first of all

    def begin(self) -> None:
        """The next pass of the model begins a step. DDP broadcasts buffers before, which is no compute."""
        self._pending = True

    def profile(self) -> Profile | None:
        """Of the steps so far; None where one has no gradients."""
        self._marks.watch.wait()
        watch = self._marks.watch
        for marks in self._steps:
            if not marks.ready:
                return None
            begin = marks.begin
            # Then DDP waits for the averages, which is no compute either.
            marks.end = max(marks.ready.values(), key=lambda mark: watch.seconds(begin, mark))
        return self._marks.profile(self._steps) if self._steps else None

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _enter_root(self) -> None:
        if self._pending:
            self._pending = False
            self._steps.append(self._marks.begin())


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
