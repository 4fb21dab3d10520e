"""The ways to train that the benchmarks compare: plain DDP, ZeRO, FSDP2 and the backends of torchext.

A contender is named by a text; one small class per way holds the lines that its user writes and nothing else.

| text | way |
| --- | --- |
| ``ddp``, ``ddp:4`` | DDP over gloo, with its default buckets or with ``bucket_cap_mb=4`` |
| ``zero``, ``zero:4`` | DDP and ``ZeroRedundancyOptimizer`` |
| ``fsdp2``, ``fsdp2:4`` | ``fully_shard(reshard_after_forward=False)``: each layer, or groups of about 4 MiB |
| ``dear:sharded/auto`` | the backend of that name with ``form="sharded"``, ``bucket_mb="auto"`` (or a number) |
| ``dear:sharded/2/hierarchical`` | the same with ``transport="hierarchical"`` |
| ``dssync:grid/atc`` | the backend of that name with ``schedule="grid"``, ``order="atc"`` |
| ``prague:smart/atc`` | the backend of that name with ``generator="smart"``, ``order="atc"`` |
| ``hop``, ``hop:backup=1+max_ig=4`` | the backend of that name in standard mode, or with these options |

Options of hop are separated by ``+`` or by commas (which separate contenders on a command line); short names:
``max_ig`` is ``max_iteration_gap``, ``backup`` is ``backup_workers``.

ZeRO's ``overlap_with_ddp`` is missing on purpose: torch refuses it on gloo, where it may hang (pytorch issue 62300).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

MakeOptimizer = functools.partial[Any]

_OPTIONS_CLASSES = {
    "prague": "PragueOptions",
    "dear": "DeAROptions",
    "dssync": "DSSyncOptions",
    "hop": "HopOptions",
}
_VARIANT = {"prague": "generator", "dssync": "schedule"}  # which option the text names before the order
_SHORT_NAMES = {"max_ig": "max_iteration_gap", "backup": "backup_workers"}
_MEBIBYTE = 1 << 20


class Training:
    """A module that is trained by plain DDP; the other ways derive from it.

    Args:
        module: The same on all ranks from the start. Its layers stand in ``module.body``, in the order of forward.
        make_optimizer: Class and settings of the optimizer, without the parameters.
        bucket_mb: DDP's ``bucket_cap_mb``; None is its default.

    Attributes:
        module: As given.
        model: What the loop calls.
        optimizer: What the loop steps.
        sync: The synchronizer of a torchext backend, once attached.
    """

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer, bucket_mb: float | None = None) -> None:
        self.module, self.bucket_mb = module, bucket_mb
        self.sync: Any = None
        self.model = self.wrap()
        self.optimizer = self.make_optimizer(make_optimizer)

    def wrap(self) -> nn.Module:
        """Returns the parallel model."""
        # The replicas start equal: broadcasting 100 MB over a slow link would take longer than measuring.
        return DistributedDataParallel(self.module, bucket_cap_mb=self.bucket_mb, init_sync=False)

    def make_optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """Returns the optimizer of the wrapped module's parameters."""
        optimizer: torch.optim.Optimizer = make(self.module.parameters())
        return optimizer

    def attach(self) -> None:
        """The line that a backend of torchext adds to the user's script."""

    def settle(self) -> None:
        """Returns when nothing is under way: parameters can be read."""

    def synchronize(self) -> None:
        """Makes all replicas equal, where the algorithm lets them differ; collective."""

    def parameters(self) -> list[torch.Tensor]:
        """Returns whole parameters, also where a rank holds a shard of each; collective."""
        return [weight.detach() for weight in self.module.parameters()]

    def stats(self) -> dict[str, Any] | None:
        """Returns the synchronizer's counters."""
        return None

    def decided(self) -> bool:
        """Returns whether it has stopped to try out settings of its own."""
        return True

    def iteration(self) -> int:
        """Returns how many iterations are done, skipped ones included; 0 where that is the number of steps."""
        return 0

    def detach(self) -> None:
        """Leaves the algorithm; collective."""


class ZeroTraining(Training):
    """DDP, and an optimizer of which each rank holds a share of the state and broadcasts its share of the steps."""

    def make_optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        optimizer_class: Any = make.func
        return ZeroRedundancyOptimizer(self.module.parameters(), optimizer_class=optimizer_class, **make.keywords)


class FSDP2Training(Training):
    """FSDP2, keeping whole parameters between forward and backward: the traffic of a reduce-scatter and an all-gather.

    ``bucket_mb`` groups consecutive layers until they hold that much; None makes each layer a unit of its own.
    """

    def wrap(self) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        layers = self.module.body
        assert isinstance(layers, nn.Sequential)
        for unit in grouped(list(layers), self.bucket_mb):
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.module, mesh=mesh, reshard_after_forward=False)
        return self.module

    def parameters(self) -> list[torch.Tensor]:
        shards: list[Any] = list(self.module.parameters())  # DTensors
        return [shard.full_tensor().detach() for shard in shards]


class TorchextTraining(Training):
    """DDP over a backend of torchext, attached."""

    def attach(self) -> None:
        import torchext

        assert isinstance(self.model, DistributedDataParallel)
        self.sync = torchext.attach(self.model, self.optimizer)

    def settle(self) -> None:
        self.sync.wait()

    def synchronize(self) -> None:
        self.sync.synchronize()

    def stats(self) -> dict[str, Any] | None:
        counters: dict[str, Any] = self.sync.stats()
        return counters

    def iteration(self) -> int:
        return int(getattr(self.sync, "iteration", 0))

    def decided(self) -> bool:
        return bool(self.sync.stats().get("decided", True))

    def detach(self) -> None:
        self.sync.detach()


_OVER_GLOO: dict[str, type[Training]] = {"ddp": Training, "zero": ZeroTraining, "fsdp2": FSDP2Training}


def grouped(layers: list[nn.Module], bucket_mb: float | None) -> list[list[nn.Module]]:
    """Splits layers into runs; a run ends with the layer that brings it to ``bucket_mb`` MiB, or None: each alone."""
    groups: list[list[nn.Module]] = [[]]
    held = 0
    for layer in layers:
        if groups[-1] and (bucket_mb is None or held >= bucket_mb * _MEBIBYTE):
            groups.append([])
            held = 0
        groups[-1].append(layer)
        held += sum(weight.numel() * weight.element_size() for weight in layer.parameters())
    return groups


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        name: In tables: ``ddp``, ``dear sharded/auto``.
        backend: Name for ``init_process_group``.
        options: Arguments of its options class; only for the backends of torchext.
        way: Which class trains.
        bucket_mb: Of the ways over gloo; None is their default.
    """

    name: str
    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    way: type[Training] = Training
    bucket_mb: float | None = None

    @property
    def lockstep(self) -> bool:
        """Whether all workers take every step together."""
        return self.backend not in ("prague", "hop")

    @property
    def keeps_the_mean(self) -> bool:
        """Whether averaging leaves the mean of all replicas alone, while all take equally many steps.

        Where late or old models are weighted anew the matrix of the weights is not doubly stochastic any more.
        """
        return not {"backup_workers", "staleness"} & set(self.options)

    @property
    def most_ahead(self) -> int:
        """The most steps that a worker in lockstep can have ended when another one has only entered the next.

        An all-reduce lets nobody get ahead; DeAR leaves half of its communication to the next forward; averages in
        groups hold only those of one group together, and need a round of the schedule for each step to everybody else.
        """
        return 8 if self.backend == "dssync" else 2

    @property
    def tunes(self) -> bool:
        """Whether it changes its own settings while it trains, and needs time for that before it is measured.

        With a bucket size of the user's, dear still finds out whether a plain all-reduce would be faster.
        """
        return self.backend == "dear"

    def without_fallback(self) -> Contender:
        """Returns itself, kept from training as plain DDP: to check or to look at the algorithm itself."""
        return replace(self, options={**self.options, "allreduce_fallback": False}) if self.tunes else self

    def pg_options(self) -> Any:
        """Returns what to pass as ``pg_options``."""
        if self.backend == "gloo":
            return None
        import torchext

        return getattr(torchext, _OPTIONS_CLASSES[self.backend])(**self.options)

    def prepare(self, module: nn.Module, make_optimizer: MakeOptimizer) -> Training:
        """Returns ``module`` made ready for the loop, but not attached; the process group is there."""
        return self.way(module, make_optimizer, self.bucket_mb)


def contender(text: str, **options: Any) -> Contender:
    """Reads a contender's text, as the table above has it.

    Args:
        text: ``way`` or ``way:variant``.
        options: Further options of a backend of torchext; those over gloo ignore them.
    """
    way, _, variant = text.partition(":")
    name = f"{way} {variant}".strip()
    if way in _OVER_GLOO:
        try:
            bucket_mb = float(variant) if variant else None
        except ValueError:
            raise ValueError(f"contenders: {text!r}: after {way}: comes a size in MiB, got {variant!r}") from None
        return Contender(name, "gloo", {}, _OVER_GLOO[way], bucket_mb)
    if way not in _OPTIONS_CLASSES:
        raise ValueError(f"contenders: {text!r} is none of {sorted([*_OVER_GLOO, *_OPTIONS_CLASSES])}")
    if variant:
        first, second, third = (*variant.split("/"), "", "")[:3]
        if way in _VARIANT:
            options = {**options, _VARIANT[way]: first, "order": second or "cta"}
        elif way == "hop":
            options = {**options, **_settings(text, variant)}
        else:
            options = {**options, "form": first, "bucket_mb": "auto" if second in ("", "auto") else float(second)}
            options |= {"transport": third} if third else {}
    return Contender(name, way, options, TorchextTraining)


def _settings(text: str, variant: str) -> dict[str, Any]:
    """Reads ``backup=1+max_ig=4``; what is no whole number stays a text."""
    settings: dict[str, Any] = {}
    for part in variant.replace(",", "+").split("+"):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise ValueError(f"contenders: {text!r}: expected NAME=VALUE, got {part!r}")
        settings[_SHORT_NAMES.get(name, name)] = int(value) if value.isdecimal() else value
    return settings
