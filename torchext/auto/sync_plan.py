"""The plan of a job: every way of synchronising its gradients, the predicted steps, and the one that is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext._version import __version__
from torchext.auto import json_file
from torchext.auto.all_ranks import check_same, checked_group, device_of, errors_on_all, sent_by_first
from torchext.auto.apply import apply
from torchext.auto.candidates import INEXACT, Candidate, checked_allow, row_layers, search
from torchext.auto.explanation import explanation
from torchext.auto.factor_layers import why_not_factors
from torchext.auto.fitting_stages import stages_that_fit
from torchext.auto.link_model import LinkModel, calibrate, check_number
from torchext.auto.planned_buckets import check_profiled, check_rows_apart, dear_plan
from torchext.auto.step_profile import Profile, Step, checked_model
from torchext.auto.step_profile import profile as measure
from torchext.ddp.synchronizer import Synchronizer

__all__ = ["SyncPlan", "plan", "plan_of", "planned_by_first", "why_no_dear"]

_CALLER = "torchext.auto.plan"
_STATE_TENSORS = 2  # of an optimizer, by parameter: Adam's


@dataclass(frozen=True)
class SyncPlan:
    """What :func:`plan` found: the candidates for one model, world size and network.

    Args:
        profile: Of the model.
        link: Of the network; None where there is one rank.
        candidates: Exact ones by predicted step, then those that are not possible, then inexact ones; none where there
            is one rank.
        allow: What the user allowed.
        torch_version: Of the torch that ran.
        torchext_version: Of the torchext that planned.
    """

    profile: Profile
    link: LinkModel | None
    candidates: tuple[Candidate, ...]
    allow: tuple[str, ...]
    torch_version: str
    torchext_version: str

    @property
    def chosen(self) -> Candidate | None:
        """The chosen candidate; None where there is one rank."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)

    @property
    def world_size(self) -> int:
        """How many ranks it is for."""
        return 1 if self.link is None else self.link.world_size

    def apply(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        trust: bool = False,
        **ddp_arguments: Any,
    ) -> tuple[DistributedDataParallel, Synchronizer]:
        """Wraps a model and attaches it as the plan says. Collective.

        The ranks compare plan, model and versions before anything is built. By plain DDP, with its default buckets or
        the plan's, the synchronizer has nothing to do; scripts need no branch. Layers whose rows travel get their
        gradients by :class:`FactorLayers`. By ``dear`` the buckets are compared
        with plain all-reduce in 66 steps after 11, and stay only if they are faster. Where the script's group is of
        another backend than the plan needs, a new one of the same ranks is made. On rank 0 a line in the log says
        once if the median of 50 steps is above 1.25 times the predicted one.

        Args:
            model: The module itself, not wrapped.
            optimizer: As :func:`torchext.attach` takes it.
            trust: Skips the comparison of hosts, backend and links with those of the plan, and nothing else.
            ddp_arguments: Of ``DistributedDataParallel``, but those for buckets. ``process_group``: whose ranks train;
                the default group otherwise.

        Returns:
            The DDP model, and what :func:`torchext.attach` returns, or stands in its place.

        Raises:
            RuntimeError: Before ``init_process_group``.
            TypeError: ``model`` is no module or is wrapped; ``optimizer`` is something else.
            ValueError: The plan is of another model, world size or network, named; ``bucket_cap_mb`` was passed; or
                what :func:`torchext.attach` refuses. On all ranks.
            torch.distributed.DistBackendError: Ranks have different plans, models or versions (on every rank, with
                both values), or a rank was lost.
        """
        return apply(self, model, optimizer, trust=trust, ddp_arguments=ddp_arguments)

    def dear_buckets(
        self, model: nn.Module, names: Sequence[str], form: str, transport: str, apart: Collection[str] = ()
    ) -> _C.DearPlan:
        """For :func:`torchext.attach`: the buckets, as places in ``names``.

        Args:
            model: The module inside of DDP.
            names: Of the parameters that the optimizers step, in the order of registration.
            form: Of the group's options.
            transport: Likewise.
            apart: Of these names those whose gradients are averaged apart, by :class:`FactorLayers`.

        Raises:
            ValueError: The plan is of another model, form, transport or way, or sends rows of a layer that is averaged
                with the others here.
        """
        chosen = self.chosen
        if chosen is None or chosen.way != "dear":
            way = "nothing, for one rank" if chosen is None else f"{chosen.way!r}"
            raise ValueError(
                f"torchext.attach: the plan has chosen {way}, and not dear; call plan.apply(model, optimizer)"
            )
        if chosen.form != form:
            raise ValueError(
                f"torchext.attach: the plan is for form={chosen.form!r}, and the group's DeAROptions have form={form!r}"
                "; make the group with the plan's, or call plan.apply(model, optimizer)"
            )
        if transport != "auto" and (chosen.transport == "hierarchical") != (transport == "hierarchical"):
            raise ValueError(
                f"torchext.attach: the plan is for a transport that is {chosen.transport!r}, and the group's "
                f"DeAROptions have transport={transport!r}; make the group with the plan's, or call "
                "plan.apply(model, optimizer)"
            )
        check_profiled("torchext.attach", self.profile, model)
        check_rows_apart(chosen, model, names, apart)
        return dear_plan(self.profile, chosen, model, names, apart)

    def explain(self) -> str:
        """What was measured, and for every candidate: predicted step, what of it is exposed, and why it lost."""
        if self.link is None:
            return "1 rank: nothing to synchronise"
        return explanation(self.profile, self.link, self.candidates)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Draws a predicted step of the chosen way over one of plain DDP. Needs matplotlib.

        Args:
            path: Of the picture; its ending says the format (``.png``, ``.svg``, ``.pdf``).

        Raises:
            ValueError: One rank, or an inexact way is chosen, whose ranks do not step together.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from torchext.auto.plots import draw_timeline  # imports matplotlib, which most users do without

        if self.link is None or self.chosen is None:
            raise ValueError("timeline: one rank has nothing to synchronise; plan with two ranks or more")
        if not self.chosen.exact:
            raise ValueError(
                f"timeline: the chosen way is {self.chosen.way!r}, whose ranks do not step together; pictures are of "
                "exact ways: plan with choose='auto'"
            )
        reference = next(c for c in self.candidates if (c.way, c.form) == ("ddp", "default"))
        draw_timeline(path, self.profile, self.link, [reference, self.chosen])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, with profile and link model."""
        json_file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SyncPlan:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: An unknown key or version, or a value out of range; the message has the key.
        """
        return json_file.load(cls, path)


def plan(
    model: nn.Module,
    step: Step,
    *,
    link: LinkModel | None = None,
    profile: Profile | None = None,
    allow: Sequence[str] = ("exact",),
    choose: str = "auto",
    memory: float | None = None,
    form: Literal["sharded", "replicated"] = "sharded",
    group: dist.ProcessGroup | None = None,
) -> SyncPlan:
    """Measures network and model, predicts a step with every way of synchronising gradients, and chooses. Collective.

    Rank 0 plans, and sends its plan to all. Plain DDP is chosen unless another exact way is predicted to be faster by
    more than 3 %, even if DDP's all-reduce is faster by what two calibrations differ by.

    Args:
        model: The module itself, not wrapped.
        step: Called with the model. Runs forward pass, loss and backward pass once on this rank's data; no optimizer,
            and no collective.
        link: Of this network; None: :func:`calibrate`.
        profile: Of this model; None: :func:`profile`.
        allow: ``"exact"``, which is always allowed, and the inexact ways that ``choose`` may name: ``"prague"``,
            ``"dssync"``, ``"hop"``. All are listed, with their price rho.
        choose: ``"auto"``: the exact way with the shortest step. An inexact way by name, if allowed.
        memory: Bytes that a rank has for parameters, gradients, the optimizer's state (two tensors a parameter are
            counted) and the buckets; None: no limit.
        form: ``"replicated"`` leaves out ``dear``'s sharded form, which divides the optimizer's state among the ranks.
        group: A process group; None: the default one.

    Returns:
        The same plan on all ranks.

    Raises:
        RuntimeError: Before ``init_process_group``; ``step`` raised on another rank.
        TypeError: ``model`` is no module or is wrapped, ``step`` is not callable, or the group has no backend for the
            model's device.
        ValueError: An argument out of range or that differs between ranks, a link or profile of another job, what
            :func:`profile` refuses, or memory that the model does not fit: the message has the stages of a pipeline
            that would.
        torch.distributed.DistBackendError: A rank was lost.
    """
    group = checked_group(_CALLER, group)
    with errors_on_all(_CALLER, group):
        checked_model(_CALLER, model)
        allow = checked_allow(_CALLER, allow)
        _check_choice(choose, allow, form)
        memory = None if memory is None else check_number("memory", memory)
        device = _device(model)
        if group.size() > 1:
            device_of(_CALLER, group, device)
        _check_link(link, group.size(), device)
        if profile is not None:
            _check_profile(profile, model)
    given = {"allow": allow, "choose": choose, "memory": memory, "form": form}
    given |= {"link": "given" if link else None, "profile": "given" if profile else None}
    check_same(_CALLER, group, given)
    if profile is None:
        profile = measure(model, step, group=group)
    with errors_on_all(_CALLER, group):
        spare = _spare_bytes(memory, profile, group.size())
    if group.size() == 1:
        return plan_of(profile, None, (), allow)
    if link is None:
        link = calibrate(group, device=device)
    known, network = profile, link

    def candidates() -> list[Candidate]:
        without_rows = _without_rows(model, known)
        return search(
            known,
            network,
            listed=INEXACT,
            allow=allow,
            choose=choose,
            spare_bytes=spare,
            refused=_refused(model, form, known, without_rows),
            without_rows=tuple(without_rows),
        )

    return planned_by_first(_CALLER, group, profile, link, candidates, allow)


def planned_by_first(
    caller: str,
    group: dist.ProcessGroup,
    profile: Profile,
    link: LinkModel,
    candidates: Callable[[], Sequence[Candidate]],
    allow: tuple[str, ...] = ("exact",),
) -> SyncPlan:
    """Has rank 0 search, and sends its plan to all. Collective."""
    found: str | None = None
    with errors_on_all(caller, group):
        if group.rank() == 0:
            found = json_file.dumps(plan_of(profile, link, candidates(), allow))
    return json_file.loads(SyncPlan, sent_by_first(group, found), "rank 0's plan")


def plan_of(
    profile: Profile, link: LinkModel | None, candidates: Sequence[Candidate], allow: tuple[str, ...] = ("exact",)
) -> SyncPlan:
    """A plan that is made here and now."""
    return SyncPlan(profile, link, tuple(candidates), allow, str(torch.__version__), __version__)


def _check_choice(choose: str, allow: tuple[str, ...], form: str) -> None:
    if choose not in ("auto", *INEXACT):
        raise ValueError(f"{_CALLER}: choose must be 'auto' or one of {', '.join(INEXACT)}, got {choose!r}")
    if choose != "auto" and choose not in allow:
        raise ValueError(
            f"{_CALLER}: choose is {choose!r}, and allow is {allow}; an inexact way is chosen only if both name it"
        )
    if form not in ("sharded", "replicated"):
        raise ValueError(f"{_CALLER}: form must be 'sharded' or 'replicated', got {form!r}")


def _check_link(link: LinkModel | None, world_size: int, device: torch.device) -> None:
    if link is None:
        return
    if not isinstance(link, LinkModel):
        raise TypeError(f"{_CALLER}: link must be a torchext.auto.LinkModel, got {type(link).__name__}")
    if link.world_size != world_size:
        raise ValueError(
            f"{_CALLER}: link was measured with {link.world_size} ranks, and the group has {world_size}; calibrate "
            "this group, or ask torchext.auto.simulate"
        )
    if link.device != device.type:
        raise ValueError(
            f"{_CALLER}: link was measured with tensors on {link.device}, and the model is on {device.type}; calibrate "
            f"with device={device.type!r}"
        )


def _check_profile(profile: Profile, model: nn.Module) -> None:
    if not isinstance(profile, Profile):
        raise TypeError(f"{_CALLER}: profile must be a torchext.auto.Profile, got {type(profile).__name__}")
    check_profiled(_CALLER, profile, model)


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def _spare_bytes(memory: float | None, profile: Profile, ranks: int) -> float:
    """What is left beside what every way takes; 0: no limit."""
    if memory is None:
        return 0.0
    parameters, gradients = profile.parameter_bytes, profile.gradient_bytes
    state = _STATE_TENSORS * gradients
    spare = memory - parameters - gradients - state
    if spare <= 0:
        raise ValueError(
            f"{_CALLER}: memory is {memory:.0f} bytes, and parameters take {parameters}, gradients {gradients} and the "
            f"optimizer's state {state}; give more than their sum, {parameters + gradients + state}, or "
            f"{stages_that_fit(profile, memory, ranks, state_tensors=_STATE_TENSORS)}"
        )
    return spare


def _without_rows(model: nn.Module, profile: Profile) -> dict[str, str]:
    """Layers whose rows cannot travel -> why."""
    found = {name: why_not_factors(model, name) for name in row_layers(profile)}
    return {name: str(why) for name, why in found.items() if why is not None}


def _refused(model: nn.Module, form: str, profile: Profile, without_rows: dict[str, str]) -> dict[str, str]:
    refused: dict[str, str] = {}
    if without_rows and len(without_rows) == len(row_layers(profile)):
        refused["factors"] = f"not possible: {next(iter(without_rows.values()))}"
    if form == "replicated":
        refused["dear sharded"] = "not possible: form is 'replicated'"
    why = why_no_dear(model)
    if why:
        refused["dear"] = f"not possible: {why}"
    return refused


def why_no_dear(model: nn.Module) -> str:
    """What of a model ``dear`` cannot train; empty: nothing."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            return f"{name!r} has sparse gradients"
    return ""
