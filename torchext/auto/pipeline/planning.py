"""Plans a pipeline: checks what is asked, and searches each tensor width of which there is a profile."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchext._version import __version__
from torchext.auto.link_model import LinkModel, check_number
from torchext.auto.pipeline import search
from torchext.auto.pipeline.layer_profile import LayerProfile
from torchext.auto.pipeline.pipeline_plan import PipelinePlan
from torchext.auto.pipeline.placement import ORDERS
from torchext.auto.pipeline.search import Alternative
from torchext.base.plain import plain

__all__ = ["checked_memory", "plan"]

_CALLER = "torchext.auto.pipeline"
_MEMORY = re.compile(r"\s*([\d.]+)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_MOST = 1 << 20  # ranks, micro-batches


def plan(
    profile: LayerProfile | Mapping[str, Any],
    link: LinkModel,
    *,
    world_size: int,
    microbatches: int,
    memory: int | str | None = None,
    schedules: Sequence[str] = ("1f1b",),
    stages: int | None = None,
    state_factor: float = 4.0,
    recompute: bool = False,
    tensor: Mapping[int, LayerProfile] | None = None,
) -> PipelinePlan:
    """Cuts the layers into stages, and chooses how deep these are filled and in which order they work. Local.

    Args:
        profile: Of the layers: :func:`profile`, :meth:`LayerProfile.load`, or a mapping as :meth:`LayerProfile.of`
            takes it.
        link: Between the ranks: :func:`torchext.auto.calibrate`, ``LinkModel.load`` or ``LinkModel.of``.
        world_size: Ranks.
        microbatches: Into which the batch of a step is cut, over all ranks; of d ranks with the same stage each takes
            a d-th of them.
        memory: Of a rank: bytes, or a text as ``"12GiB"``; None: no limit.
        schedules: Of ``"1f1b"`` (with any warm-up depth), ``"gpipe"`` and ``"zero-bubble"``.
        stages: How many; None: the best number that divides ``world_size``.
        state_factor: Bytes that a byte of a parameter takes with its gradient and the optimizer's state; Adam's 4.
        recompute: Whether stages that memory limits may drop activations and compute them again.
        tensor: Width -> profile of the same layers, each divided over so many ranks, with the parameters of one rank.

    Returns:
        The plan, the same on all ranks that give the same.

    Raises:
        TypeError: ``profile`` or ``link`` is something else.
        ValueError: An argument out of range, fewer layers than stages, stages that do not divide the world, or memory
            in which nothing fits, with the least that would.
    """
    profile = _checked_profile(profile)
    if not isinstance(link, LinkModel):
        raise TypeError(
            f"{_CALLER}.plan: link must be a torchext.auto.LinkModel, got {type(link).__name__}; calibrate one, or "
            "take LinkModel.of(latency=..., bandwidth=...)"
        )
    world_size = _checked_count("world_size", world_size)
    microbatches = _checked_count("microbatches", microbatches)
    if stages is not None:
        stages = _checked_count("stages", stages)
        if world_size % stages != 0:
            raise ValueError(
                f"{_CALLER}.plan: stages is {stages}, which does not divide world_size, {world_size}; every stage has "
                "the same number of ranks"
            )
        _check_layers(profile, stages)
    state_factor = check_number("state_factor", state_factor)
    if state_factor < 1:
        raise ValueError(f"state_factor must be 1 or more, for the parameters themselves, got {state_factor}")
    options = search.Options(
        world_size=world_size,
        microbatches=microbatches,
        memory=None if memory is None else checked_memory(memory),
        schedules=_checked_schedules(schedules, profile),
        stages=stages,
        state_factor=state_factor,
        recompute=bool(recompute),
    )
    profiles = {1: profile, **_checked_tensor(tensor, profile)}
    best: tuple[LayerProfile, search.Found] | None = None
    refused: ValueError | None = None
    for width, of_width in profiles.items():
        if world_size % width != 0 or (stages is not None and world_size // width % stages != 0):
            continue
        try:
            found = search.plan(of_width, link, options, tensor=width)
        except ValueError as error:
            refused = refused or error
            continue
        if best is None or found.seconds < best[1].seconds:
            best = of_width, found
    if best is None:
        raise ValueError(f"{_CALLER}.plan: {refused}") from None
    chosen, result = best
    left_out = (
        (Alternative("zero-bubble", None, "torch does not split the backward pass of compiled layers"),)
        if profile.compiled and "zero-bubble" in _names(schedules)
        else ()
    )
    return PipelinePlan(
        **vars(result) | {"alternatives": (*result.alternatives, *left_out)},
        profile=chosen,
        link=link,
        memory=options.memory,
        state_factor=state_factor,
        torch_version=str(torch.__version__),
        torchext_version=__version__,
    )


def checked_memory(memory: int | str) -> int:
    """Bytes of ``"12GiB"``, ``"500 MB"``, or of a number.

    Raises:
        TypeError: It is neither.
        ValueError: It is not above 0, or no such text.
    """
    if isinstance(memory, str):
        found = _MEMORY.fullmatch(memory)
        if found is None or found[1].count(".") > 1 or found[1] == ".":
            raise ValueError(f"{_CALLER}: memory must be bytes, or a text as '12GiB' or '500MB', got {memory!r}")
        unit = (found[2] or "B").upper().removesuffix("B")
        memory_bytes = float(found[1]) * (1024 if unit.endswith("I") else 1000) ** " KMGT".index(unit[:1] or " ")
    else:
        memory_bytes = check_number("memory", memory)
    if memory_bytes < 1:
        raise ValueError(f"{_CALLER}: memory must be above 0 bytes, got {memory!r}")
    return int(memory_bytes)


def _checked_profile(profile: LayerProfile | Mapping[str, Any]) -> LayerProfile:
    if isinstance(profile, Mapping):
        return LayerProfile.of(profile)
    if not isinstance(profile, LayerProfile):
        raise TypeError(
            f"{_CALLER}.plan: profile must be a torchext.auto.pipeline.LayerProfile or a mapping, got "
            f"{type(profile).__name__}; torchext.auto.pipeline.profile(model, microbatch) measures one"
        )
    return profile


def _checked_count(name: str, value: int) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ValueError(f"{_CALLER}.plan: {name} must be a whole number from 1 to {_MOST}, got {value!r}")
    return value


def _check_layers(profile: LayerProfile, stages: int) -> None:
    if len(profile.layers) < stages:
        raise ValueError(
            f"{_CALLER}: {stages} stages need a layer each, and the profile has {len(profile.layers)}; take fewer "
            "stages, or name smaller parts of the model as layers"
        )


def _names(schedules: Sequence[str]) -> tuple[str, ...]:
    return (schedules,) if isinstance(schedules, str) else tuple(schedules)


def _checked_schedules(schedules: Sequence[str], profile: LayerProfile) -> tuple[str, ...]:
    names = _names(schedules)
    for name in names:
        if name not in ORDERS:
            raise ValueError(f"{_CALLER}.plan: schedules must be of {', '.join(ORDERS)}, got {name!r}")
    kept = tuple(name for name in ORDERS if name in names and not (profile.compiled and name == "zero-bubble"))
    if not kept:
        raise ValueError(
            f"{_CALLER}.plan: schedules must have one or more of {', '.join(ORDERS)}"
            + ("; torch does not split the backward pass of compiled layers" if names else ", got none")
        )
    return kept


def _checked_tensor(tensor: Mapping[int, LayerProfile] | None, profile: LayerProfile) -> dict[int, LayerProfile]:
    found = {}
    for width, of_width in (tensor or {}).items():
        width = _checked_count("a width in tensor", width)
        of_width = _checked_profile(of_width)
        if of_width.names != profile.names:
            raise ValueError(
                f"{_CALLER}.plan: the profile of tensor width {width} is of other layers; measure the same"
            )
        found[width] = of_width
    return found
