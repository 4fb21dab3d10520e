"""The plan of a pipeline: stages, order of work, prediction, what lost and why, and what more memory would bring."""

from __future__ import annotations

import os
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
from torchext.auto.link_model import LinkModel
from torchext.auto.pipeline import search
from torchext.auto.pipeline.layer_profile import LayerProfile, check_shared, is_compiled, layers_of
from torchext.auto.pipeline.placement import Placement, even_sizes
from torchext.auto.pipeline.plan_text import explained
from torchext.auto.pipeline.search import Found, Point, Prediction

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["PipelinePlan"]

_CALLER = "torchext.auto.pipeline"


@dataclass(frozen=True)
class PipelinePlan(Found):
    """What :func:`plan` found, and for what; or a placement of your own with its prediction, by :meth:`of`.

    The fields of what was found are the plan's own: ``placement``, ``seconds``, ``bubble``, ``peak_bytes``,
    ``exhaustive``, ``alternatives`` and ``points``.

    Args:
        profile: Of the layers.
        link: Of the network.
        memory: What a rank has, in bytes; None: no limit was given.
        state_factor: Bytes that a byte of a parameter takes with its gradient and the optimizer's state.
        torch_version: Of the torch that ran.
        torchext_version: Of the torchext that planned.
    """

    profile: LayerProfile
    link: LinkModel
    memory: int | None
    state_factor: float
    torch_version: str
    torchext_version: str

    def __post_init__(self) -> None:
        _check_layers(self.profile, self.placement)

    @classmethod
    def of(
        cls, profile: LayerProfile, link: LinkModel, placement: Placement, *, state_factor: float = 4.0
    ) -> PipelinePlan:
        """A placement that you chose, with its prediction: to compare it, or to run it.

        Raises:
            ValueError: It is of another number of layers.
        """
        _check_layers(profile, placement)
        run = search.predict(profile, link, placement, state_factor=state_factor)
        return cls(
            placement=placement,
            seconds=run.seconds,
            bubble=run.bubble,
            peak_bytes=run.peak_bytes,
            exhaustive=False,
            alternatives=(),
            points=(),
            profile=profile,
            link=link,
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

    def predict(self, *, mode: str | None = None) -> Prediction:
        """Plays a step.

        Args:
            mode: When transfers start: ``"torch"`` where torch's runtime posts receives, ``"class"`` where Schedule1F1B
                and ScheduleGPipe do. In both, transfers of a rank share its port if the link was measured. ``"ideal"``:
                at once, and each by itself. None: as what :meth:`schedule` gives.

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


def _check_layers(profile: LayerProfile, placement: Placement) -> None:
    if placement.layers != len(profile.layers):
        raise ValueError(
            f"placement is of {placement.layers} layers, and profile of {len(profile.layers)}; take both of one model"
        )
