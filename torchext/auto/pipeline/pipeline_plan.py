"""The plan of a pipeline: stages, order of work, prediction, what lost and why, and what more memory would bring."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torchext._version import __version__
from torchext.auto import json_file
from torchext.auto.all_ranks import check_same, checked_group
from torchext.auto.link_model import LinkModel, check_number
from torchext.auto.pipeline import search
from torchext.auto.pipeline.layer_profile import LayerProfile, check_shared, is_compiled, layers_of
from torchext.auto.pipeline.placement import ORDERS, Placement
from torchext.auto.pipeline.plan_text import explained
from torchext.auto.pipeline.search import Alternative, Point, Prediction
from torchext.base.plain import plain

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["Alternative", "PipelinePlan", "Point", "Prediction", "even_sizes", "plan"]

_CALLER = "torchext.auto.pipeline"
_MEMORY = re.compile(r"\s*([\d.]+)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_MOST = 1 << 20  # ranks, micro-batches


@dataclass(frozen=True)
class PipelinePlan:
    """What :func:`plan` found; or a placement of your own with its prediction, by :meth:`of`.

    Args:
        profile: Of the layers.
        link: Of the network.
        placement: Which layers stand on which rank, and in which order they work.
        seconds: Predicted, of a step without the optimizer.
        bubble: Predicted, the share of all ranks' time in which they wait.
        peak_bytes: Of each stage, planned: parameters with their state, and activations.
        exhaustive: Whether every way to cut the layers was tried.
        alternatives: What else was tried, the best first.
        points: What a frontier has: see :meth:`frontier`.
        memory: What a rank has, in bytes; None: no limit was given.
        state_factor: Bytes that a byte of a parameter takes with its gradient and the optimizer's state.
        torch_version: Of the torch that ran.
        torchext_version: Of the torchext that planned.
    """

    profile: LayerProfile
    link: LinkModel
    placement: Placement
    seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]
    exhaustive: bool
    alternatives: tuple[Alternative, ...]
    points: tuple[Point, ...]
    memory: int | None
    state_factor: float
    torch_version: str
    torchext_version: str

    def __post_init__(self) -> None:
        if self.placement.layers != len(self.profile.layers):
            raise ValueError(
                f"placement is of {self.placement.layers} layers, and profile of {len(self.profile.layers)}; take both "
                "of one model"
            )

    @classmethod
    def of(
        cls, profile: LayerProfile, link: LinkModel, placement: Placement, *, state_factor: float = 4.0
    ) -> PipelinePlan:
        """A placement that you chose, with its prediction: to compare it, or to run it.

        Raises:
            ValueError: It is of another number of layers.
        """
        _check_layers(profile, len(placement.stages))
        found = search.predict(profile, link, placement, state_factor=state_factor)
        return cls(
            profile=profile,
            link=link,
            placement=placement,
            seconds=found.seconds,
            bubble=found.bubble,
            peak_bytes=found.peak_bytes,
            exhaustive=False,
            alternatives=(),
            points=(),
            memory=None,
            state_factor=state_factor,
            torch_version=str(torch.__version__),
            torchext_version=__version__,
        )

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each stage the most micro-batches in flight."""
        return tuple(stage.depth for stage in self.placement.stages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each stage how many layers it has."""
        return tuple(stage.size for stage in self.placement.stages)

    def explain(self) -> str:
        """What is planned, a line for each stage, and what lost and why."""
        return explained(self)

    def frontier(self) -> list[Point]:
        """This much more memory buys that much time: memory rises from point to point, and time falls."""
        return list(self.points)

    def module_names(self, stage: int) -> list[str]:
        """Names of a stage's layers."""
        found = self.placement.stages[stage]
        return list(self.profile.names[found.first : found.last + 1])

    def split_spec(self) -> dict[str, Any]:
        """For ``torch.distributed.pipelining.pipeline``: the first layer of each stage but the first."""
        from torch.distributed.pipelining import SplitPoint  # slow to import, and rarely needed

        return {self.module_names(stage)[0]: SplitPoint.BEGINNING for stage in range(1, len(self.placement.stages))}

    def table(self) -> list[list[str]]:
        """Of each rank of the pipeline what it does, in order: ``"2F0"`` is stage 2's forward of micro-batch 0."""
        return [list(row) for row in self.placement.table]

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as torch's pipelines read it: a row for each rank."""
        Path(path).write_text(self.placement.csv())

    def predict(self, *, mode: str = "torch") -> Prediction:
        """Plays a step.

        Args:
            mode: When transfers start: ``"torch"`` where torch's runtime posts receives, ``"ideal"`` at once,
                ``"class"`` as Schedule1F1B and ScheduleGPipe do.

        Raises:
            ValueError: An unknown mode, or one that does not fit the order.
        """
        return search.predict(self.profile, self.link, self.placement, state_factor=self.state_factor, mode=mode)

    def stage(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        pp_group: dist.ProcessGroup,
        dp: dist.ProcessGroup | None = None,
    ) -> PipelineStage:
        """This rank's stage, as torch's schedules take it. Collective where ``dp`` has several ranks.

        The layers are the model's own, not copies. With ``dp`` gradients are averaged over its ranks; buckets are the
        plan's.

        Args:
            model: What was profiled: an ``nn.Sequential``, or name -> module in order. Of other stages' layers only
                the names are looked at.
            pp_group: The ranks of one pipeline: rank j has stage j.
            dp: The ranks that have the same stage; None where there is one.

        Raises:
            TypeError: The model or a group is something else.
            ValueError: A plan for other layers or for another number of ranks, data widths that differ, layers of
                two stages that share a parameter, or a compiled layer in an order that splits the backward pass.
        """
        from torchext.auto.pipeline import torch_runtime  # torch's pipelines are slow to import

        caller = f"{_CALLER}: stage"
        pp_group = checked_group(caller, pp_group)
        data = 1 if dp is None else checked_group(caller, dp).size()
        layers = layers_of(caller, model)
        self._check_names(caller, layers)
        placement = self.placement
        if placement.data == 0:
            raise ValueError(
                f"{caller}: the stages have data widths {', '.join(str(s.data) for s in placement.stages)}, and torch's"
                " stages talk one to one; run a plan with the same width everywhere"
            )
        if pp_group.size() != len(placement.stages):
            raise ValueError(
                f"{caller}: the plan has {len(placement.stages)} stages, and the pipeline's group {pp_group.size()} "
                "ranks; plan for this world, or make the group with a rank for each stage"
            )
        if data != placement.data:
            raise ValueError(
                f"{caller}: the plan has {placement.data} ranks for each stage, and dp has {data}; pass the group of "
                "the ranks that have the same stage"
            )
        number = pp_group.rank()
        own = {name: layers[name] for name in self.module_names(number)}
        check_shared(caller, layers)
        if placement.splits_backward:
            for name, layer in own.items():
                if is_compiled(layer):
                    raise ValueError(
                        f"{caller}: the layer {name!r} is compiled, and torch does not split the backward pass of such "
                        "layers; plan with schedules=('1f1b',)"
                    )
        return torch_runtime.make_stage(placement, own, number, pp_group, dp, offer=self._public_offer)

    def schedule(self, stage: PipelineStage, loss_fn: Callable[..., torch.Tensor], *, scale_grads: bool = True) -> Any:
        """The schedule of torch's that runs the plan: ``step(x)`` on the first stage, ``step(target=y)`` on the last.

        Collective over the stage's group.

        Args:
            stage: What :meth:`stage` gave.
            loss_fn: Called with the last stage's output and the target of a micro-batch.
            scale_grads: Whether gradients are divided by the number of micro-batches, as for a mean.

        Raises:
            ValueError: Other ranks have another plan; a stage of another plan; a torch that lacks what runs the order.
        """
        from torchext.auto.pipeline import torch_runtime

        caller = f"{_CALLER}: schedule"
        group = checked_group(caller, getattr(stage, "group", None))
        check_same(caller, group, {"plan": self.fingerprint(), "scale_grads": scale_grads})
        if (stage.num_stages, stage.stage_index) != (len(self.placement.stages), group.rank()):
            raise ValueError(
                f"{caller}: got stage {stage.stage_index} of {stage.num_stages} on rank {group.rank()}, and the plan "
                f"has {len(self.placement.stages)}; pass what this plan's stage() gave"
            )
        return torch_runtime.make_schedule(
            self.placement, stage, loss_fn, scale_grads=scale_grads, offer=self._public_offer
        )

    def fingerprint(self) -> str:
        """A short text that plans share which run alike."""
        return self.placement.fingerprint()

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Draws a predicted step of the plan over one of 1F1B with equal stages. Needs matplotlib.

        Args:
            path: Of the picture; its ending says the format (``.png``, ``.svg``, ``.pdf``).

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from torchext.auto.pipeline.gantt import draw_pipelines  # imports matplotlib, which most users do without

        draw_pipelines(path, {"1F1B, equal stages": self.reference(), "plan": self})

    def reference(self) -> PipelinePlan:
        """Strict 1F1B on stages of equal numbers of layers, with as many stages and ranks."""
        return self._public(even_sizes(len(self.profile.layers), len(self.placement.stages)), "1f1b")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, with profile and link model."""
        json_file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelinePlan:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: An unknown key or version, or a value out of range; the message has the key.
        """
        return json_file.load(cls, path)

    def _check_names(self, caller: str, layers: Mapping[str, nn.Module]) -> None:
        for place, (planned, found) in enumerate(zip(self.profile.names, layers, strict=False)):
            if planned != found:
                raise ValueError(
                    f"{caller}: layer {place} is {planned!r} in the plan and {found!r} in the model; plan this one"
                )
        if len(layers) != len(self.profile.layers):
            raise ValueError(
                f"{caller}: the plan has {len(self.profile.layers)} layers, and the model {len(layers)}; plan for this "
                "model"
            )

    def _public(self, sizes: Sequence[int], order: str) -> PipelinePlan:
        """The same layers in the order of a public class of torch's."""
        own = self.placement
        stages = len(own.stages)
        depths = [own.microbatches] * stages if order == "gpipe" else list(range(stages, 0, -1))
        placement = Placement.by_depth(sizes, depths, own.microbatches, data=max(1, own.data), order=order)
        return PipelinePlan.of(self.profile, self.link, placement, state_factor=self.state_factor)

    def _public_offer(self) -> str:
        """The best plan that needs no private name of torch's."""
        stages = len(self.placement.stages)
        choices = []
        for sizes in {self.sizes, tuple(even_sizes(len(self.profile.layers), stages))}:
            for order in ("gpipe", "1f1b"):
                if order == "gpipe" or self.placement.microbatches >= stages:
                    choices.append(self._public(sizes, order))
        fitting = [one for one in choices if self.memory is None or max(one.peak_bytes) <= self.memory] or choices
        best = min(fitting, key=lambda one: (round(one.predict(mode="class").seconds, 9), max(one.peak_bytes)))
        name = "ScheduleGPipe" if best.placement.order == "gpipe" else "Schedule1F1B"
        return (
            f"the best plan with a public class is {name} on stages of {', '.join(map(str, best.sizes))} layers, "
            f"{best.predict(mode='class').seconds * 1e3:.4g} ms a step: PipelinePlan.of(...) makes it"
        )


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
        profile=chosen,
        link=link,
        placement=result.placement,
        seconds=result.seconds,
        bubble=result.bubble,
        peak_bytes=result.peak_bytes,
        exhaustive=result.exhaustive,
        alternatives=(*result.alternatives, *left_out),
        points=result.points,
        memory=options.memory,
        state_factor=state_factor,
        torch_version=str(torch.__version__),
        torchext_version=__version__,
    )


def even_sizes(layers: int, stages: int) -> list[int]:
    """Equal numbers of layers, the first stages with one more where they do not divide."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


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
