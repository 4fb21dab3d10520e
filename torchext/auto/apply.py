"""Training by a plan: all ranks agree on it, and the model is wrapped and attached as the plan says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext._attach import attach, listed
from torchext._version import __version__
from torchext.auto import json_file
from torchext.auto.all_ranks import check_same, checked_group, device_of, errors_on_all, own_backend
from torchext.auto.factor_layers import FactorLayers, why_not_factors
from torchext.auto.planned_buckets import bucket_limits, check_profiled
from torchext.auto.step_profile import checked_model
from torchext.auto.step_watch import StepWatch
from torchext.backends import BACKENDS, backend_of
from torchext.ddp.plain_synchronizer import PlainSynchronizer
from torchext.ddp.synchronizer import Synchronizer
from torchext.dear.dear_attachment import check_dear
from torchext.errors import UnsupportedBackendError

if TYPE_CHECKING:
    from torchext.auto.sync_plan import SyncPlan

__all__ = ["apply", "told_of"]

_CALLER = "SyncPlan.apply"
_MEBIBYTE = 1 << 20
_CHOSEN_BY_PLAN = ("bucket_cap_mb", "bucket_cap_mb_list")
_SAME_ARGUMENTS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
_OPTIONS_OF = {"prague": "group_size", "dssync": "group_size"}


def apply(
    plan: SyncPlan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    trust: bool,
    ddp_arguments: dict[str, Any],
) -> tuple[DistributedDataParallel, Synchronizer]:
    """What :meth:`torchext.auto.SyncPlan.apply` does."""
    group = checked_group(_CALLER, ddp_arguments.pop("process_group", None))
    with errors_on_all(_CALLER, group):
        checked_model(_CALLER, model)
        optimizers = listed(_CALLER, optimizer)
        _check_arguments(ddp_arguments)
        _check_optimizers(plan, model, optimizers)
        _check_factors(plan, model)
    _agree(plan, model, group, ddp_arguments)
    check_profiled(_CALLER, plan.profile, model)
    if plan.world_size != group.size():
        raise ValueError(
            f"{_CALLER}: the plan is for {plan.world_size} ranks, and the group has {group.size()}; call "
            "torchext.auto.plan here, or ask torchext.auto.simulate(..., world_size=...)"
        )
    if not trust:
        _check_network(plan, group, _device(model))
    ddp, synchronizer = _Maker(plan, model, optimizers, group, ddp_arguments).make()
    if plan.chosen is not None:
        speaks = group.rank() == 0
        StepWatch(synchronizer, optimizers[0], plan.chosen.step_seconds, speaks=speaks)
    return ddp, synchronizer


class _Maker:
    """Wraps and attaches one model in the way that the plan has chosen."""

    def __init__(
        self,
        plan: SyncPlan,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        group: dist.ProcessGroup,
        ddp_arguments: dict[str, Any],
    ) -> None:
        self._plan, self._model, self._optimizers = plan, model, optimizers
        self._group, self._arguments = group, ddp_arguments

    def make(self) -> tuple[DistributedDataParallel, Synchronizer]:
        """Collective."""
        chosen = self._plan.chosen
        if chosen is None or chosen.way == "ddp":
            return self._plain()
        if chosen.way == "dear":
            group = self._group_of_dear(chosen.form, chosen.transport)
            ddp = self._wrapped(group)
            return ddp, attach(ddp, self._optimizers, plan=self._plan)
        options: dict[str, Any] = {"order": chosen.form}
        if chosen.way in _OPTIONS_OF:
            options[_OPTIONS_OF[chosen.way]] = chosen.partners
        ddp = DistributedDataParallel(
            self._model, process_group=self._new_group(chosen.way, **options), **self._arguments
        )
        return ddp, attach(ddp, self._optimizers)

    def _plain(self) -> tuple[DistributedDataParallel, Synchronizer]:
        own = not self._factor_layers or own_backend(self._group) is not None
        ddp = self._wrapped(self._group if own else self._new_group("dear"))
        synchronizer = PlainSynchronizer(ddp, self._optimizers)
        ddp._torchext_synchronizer = synchronizer  # type: ignore[assignment]  # typed as a submodule
        return ddp, synchronizer

    @property
    def _factor_layers(self) -> tuple[str, ...]:
        return () if self._plan.chosen is None else self._plan.chosen.factor_layers

    def _wrapped(self, group: dist.ProcessGroup) -> DistributedDataParallel:
        """The DDP model; rows of its layers go by the same group."""
        if not self._factor_layers:
            return self._averaged(group)
        rows = {p.name.removesuffix(".weight"): p.rows for p in self._plan.profile.parameters}
        layers = FactorLayers(self._model, self._factor_layers, rows, group)
        layers.install()
        try:
            ddp = self._averaged(group)
        except BaseException:
            layers.remove()
            raise
        layers.follow(ddp)
        return ddp

    def _averaged(self, group: dist.ProcessGroup) -> DistributedDataParallel:
        return DistributedDataParallel(self._model, process_group=group, **self._limits(), **self._arguments)

    def _limits(self) -> dict[str, Any]:
        chosen = self._plan.chosen
        if chosen is None or (chosen.way, chosen.form) != ("ddp", "program"):
            return {}
        registered = bool(self._arguments.get("find_unused_parameters")) and not self._arguments.get("static_graph")
        limits = bucket_limits(self._plan.profile, chosen, self._model, registered=registered)
        if limits is None:
            return {"bucket_cap_mb": self._plan.profile.gradient_bytes / len(chosen.buckets) / _MEBIBYTE}
        # Of torch 2.11 and newer, undocumented. A bucket closes when it has reached its limit, and this is exact.
        return {"bucket_cap_mb_list": [nbytes / _MEBIBYTE for nbytes in limits]}

    def _group_of_dear(self, form: str, transport: str) -> dist.ProcessGroup:
        """The script's own group if it is one with these options, else a new one."""
        try:
            backend: Any = backend_of(self._group)
        except UnsupportedBackendError:
            backend = None
        if isinstance(backend, _C.ProcessGroupDear):
            options: Any = backend.options
            hierarchical = options.transport == "hierarchical"
            same = options.transport == "auto" or hierarchical == (transport == "hierarchical")
            if same and options.form == form and options.bucket_mb == "auto":
                return self._group
        return self._new_group("dear", form=form, transport=transport if transport == "hierarchical" else "auto")

    def _new_group(self, backend: str, **options: Any) -> dist.ProcessGroup:
        group = dist.new_group(
            dist.get_process_group_ranks(self._group),
            timeout=_timeout_of(self._group, _device(self._model)),
            backend=backend,
            pg_options=BACKENDS[backend].options(**options),
            use_local_synchronization=self._group is not dist.group.WORLD,
            group_desc=f"torchext_auto_{backend}",
        )
        assert isinstance(group, dist.ProcessGroup)  # its ranks are those that call this
        return group


def _check_arguments(arguments: dict[str, Any]) -> None:
    for name in _CHOSEN_BY_PLAN:
        if name in arguments:
            raise ValueError(f"{_CALLER}: {name} is what the plan chooses; leave it out")
    if arguments.get("device_mesh") is not None:
        raise ValueError(f"{_CALLER}: pass process_group=mesh.get_group() in place of device_mesh")


def _check_optimizers(plan: SyncPlan, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    if plan.chosen is None or plan.chosen.way != "dear":
        return
    try:
        check_dear(model, optimizers, plan.chosen.form)
    except TypeError as error:
        if plan.chosen.form == "replicated":
            raise
        raise TypeError(f"{error}. torchext.auto.plan(..., form='replicated') plans without the sharded form") from None


def _check_factors(plan: SyncPlan, model: nn.Module) -> None:
    for name in () if plan.chosen is None else plan.chosen.factor_layers:
        why = why_not_factors(model, name)
        if why is not None:
            raise ValueError(f"{_CALLER}: the plan sends rows of {name!r}, and {why}; call torchext.auto.plan again")


def _agree(plan: SyncPlan, model: nn.Module, group: dist.ProcessGroup, arguments: dict[str, Any]) -> None:
    """All ranks have the same plan, model and versions; nothing is built before that is known."""
    text = json_file.dumps(plan)
    values: dict[str, Any] = {
        "the plan (its hash)": hashlib.sha256(text.encode()).hexdigest()[:16],
        **told_of(model),
        "arguments of DistributedDataParallel": sorted(arguments),
    }
    values |= {name: bool(arguments.get(name)) for name in _SAME_ARGUMENTS}
    check_same(_CALLER, group, values, kind=dist.DistBackendError)


def told_of(model: nn.Module) -> dict[str, Any]:
    """What ranks must have alike of a model and of versions, by name."""
    parameters = [
        f"{name}, {parameter.dtype}, {tuple(parameter.shape)}, {'trained' if parameter.requires_grad else 'frozen'}"
        for name, parameter in model.named_parameters()
    ]
    return {
        "torch": str(torch.__version__),
        "torchext": __version__,
        "the number of parameters": len(parameters),
        **{f"parameter {at}": text for at, text in enumerate(parameters)},
    }


def _check_network(plan: SyncPlan, group: dist.ProcessGroup, device: torch.device) -> None:
    link = plan.link
    if link is None:
        return
    way_out = "call torchext.auto.plan here, or pass trust=True"
    if not all(table.measured for table in link.tables.values()):
        raise ValueError(f"{_CALLER}: the plan is for a network that was derived from another by formula; {way_out}")
    backend = dist.get_backend(group)
    if link.backend != backend:
        raise ValueError(
            f"{_CALLER}: the plan is for backend {link.backend!r}, and the group has {backend!r}; {way_out}"
        )
    if group.size() > 1:
        host_of = tuple(_C.hosts_of(group, device_of(_CALLER, group, device)))
        if host_of != link.host_of:
            raise ValueError(
                f"{_CALLER}: the plan is for ranks on the hosts {_shown(link.host_of)}, and these are on "
                f"{_shown(host_of)}; {way_out}"
            )


def _shown(host_of: tuple[int, ...]) -> str:
    text = ", ".join(map(str, host_of[:16]))
    return f"({text}, ...)" if len(host_of) > 16 else f"({text})"


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """None: torch's default."""
    backend: Any = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
