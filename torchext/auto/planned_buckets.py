"""Buckets of a plan, as those who send them take them: ``dear`` places and ends, DistributedDataParallel limits."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from torch import nn

from torchext import _C
from torchext.auto.candidates import Candidate
from torchext.auto.step_profile import Profile

__all__ = ["bucket_limits", "check_profiled", "check_rows_apart", "dear_plan", "reduced_names"]


def check_profiled(caller: str, profile: Profile, model: nn.Module) -> None:
    """Refuses a model that is not the profiled one: other parameters, shapes or element types.

    Raises:
        ValueError: With the name of the first parameter that differs, and both values.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for expected in profile.parameters:
        found = trained.get(expected.name)
        if found is None or tuple(found.shape) != expected.shape:
            here = "none" if found is None else tuple(found.shape)
            raise ValueError(
                f"{caller}: profile is of another model: {expected.name!r} has shape {expected.shape} there and "
                f"{here} here; profile this model"
            )
        if str(found.dtype) != expected.dtype:
            raise ValueError(
                f"{caller}: profile is of another model: {expected.name!r} is {expected.dtype} there and {found.dtype} "
                "here; profile this model"
            )
    known = {parameter.name for parameter in profile.parameters}.union(profile.without_gradient)
    for name in trained:
        if name not in known:
            raise ValueError(
                f"{caller}: profile is of another model: it lacks {name!r}, which the model trains; profile this model"
            )


def reduced_names(model: nn.Module) -> list[str]:
    """Of the parameters whose gradients DistributedDataParallel averages, in the order of registration."""
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in ignored]


def check_rows_apart(candidate: Candidate, model: nn.Module, names: Sequence[str], apart: Collection[str]) -> None:
    """Refuses a model whose layers are to send rows by the candidate, and do not.

    Raises:
        ValueError: With the name of the first such layer.
    """
    for layer in candidate.factor_layers:
        for kind, parameter in model.get_submodule(layer).named_parameters(recurse=False):
            name = f"{layer}.{kind}" if layer else kind
            if parameter.requires_grad and name in names and name not in apart:
                raise ValueError(
                    f"torchext.attach: the plan sends rows of {layer!r}, and nothing does that here; call "
                    "plan.apply(model, optimizer), or install torchext.auto.FactorLayers before the model is wrapped"
                )


def dear_plan(
    profile: Profile, candidate: Candidate, model: nn.Module, names: Sequence[str], apart: Collection[str] = ()
) -> _C.DearPlan:
    """Buckets for ``dear``, as places in ``names``. Parameters without a gradient in the profile come last, together.

    Args:
        profile: Of the model.
        candidate: Whose buckets these are.
        model: Has been compared with the profile.
        names: Of the parameters that the optimizers step, in the order of registration.
        apart: Of these names those in no bucket.
    """
    place = {name: at for at, name in enumerate(names) if name not in apart}
    parameters = dict(model.named_parameters())
    last = {bucket[-1] for bucket in _without_ignored(profile, candidate, place)}
    order: list[int] = []
    ends: list[int] = []
    for position, parameter in enumerate(profile.parameters):
        if parameter.name in place:
            order.append(place[parameter.name])
            if position in last:
                ends.append(len(order))
    planned = set(order)
    rest = [at for name, at in place.items() if parameters[name].requires_grad and at not in planned]
    last_of_kind = {parameters[names[at]].dtype: at for at in rest}
    for at in rest:
        order.append(at)
        if last_of_kind[parameters[names[at]].dtype] == at:
            ends.append(len(order))
    used = sorted(
        (parameter.first_use, place[parameter.name]) for parameter in profile.parameters if parameter.name in place
    )
    return _C.DearPlan(
        gradient_order=order,
        ends=ends,
        forward_order=[at for _, at in used] + rest,
        hierarchical=candidate.transport == "hierarchical",
    )


def bucket_limits(profile: Profile, candidate: Candidate, model: nn.Module, *, registered: bool) -> list[int] | None:
    """Bytes after which DistributedDataParallel is to close each of its buckets, for the candidate's to come about.

    Args:
        profile: Of the model.
        candidate: Whose buckets these are.
        model: Has been compared with the profile.
        registered: Whether DDP keeps buckets in the order of registration (``find_unused_parameters``). Then a bucket
            is cut wherever the plan's bucket changes.

    Returns:
        None where no limits give these buckets: DDP begins its list of limits anew for each element type.
    """
    names = reduced_names(model)
    parameters = dict(model.named_parameters())
    if len({parameters[name].dtype for name in names}) > 1:
        return None
    nbytes = {name: parameters[name].nbytes for name in names}
    buckets = _without_ignored(profile, candidate, nbytes)
    if not registered:
        return [sum(profile.parameters[position].nbytes for position in bucket) for bucket in buckets]
    bucket_of = {profile.parameters[position].name: at for at, bucket in enumerate(buckets) for position in bucket}
    current = next((bucket_of[name] for name in names if name in bucket_of), 0)
    cut: list[tuple[int, int]] = []  # bucket, bytes
    for name in names:
        current = bucket_of.get(name, current)  # one without a gradient goes with those before it
        cut.append((current, nbytes[name]))
    return [sum(size for _, size in run) for _, run in itertools.groupby(cut, key=lambda entry: entry[0])]


def _without_ignored(profile: Profile, candidate: Candidate, known: dict[str, int]) -> list[list[int]]:
    """The candidate's buckets without parameters that DDP ignores."""
    buckets = [[p for p in bucket if profile.parameters[p].name in known] for bucket in candidate.buckets]
    return [bucket for bucket in buckets if bucket]
