"""KFACPreconditioner: K-FAC in front of any optimizer."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.base.plain import plain
from torchext.optim.attached_models import dear_of, living, refusal_of_dear
from torchext.optim.before_step import Handle, hook_before_step, remove_all, stepped_by
from torchext.optim.kfac_group import (
    agree_that_all_can,
    end_after,
    end_with,
    group_beside,
    least_of_ranks,
    model_backend,
    own_group,
)
from torchext.optim.kfac_options import check_together, no_copies, no_such
from torchext.optim.kfac_plan import KFACPlan
from torchext.optim.kfac_state import VERSION, check_state
from torchext.optim.layers import check_devices, find_layers, install_hooks, memory_here

__all__ = ["KFACPreconditioner"]


class KFACPreconditioner:
    """Replaces gradients by K-FAC's directions ``G^-1 dW A^-1`` before an optimizer uses them.

    One line in front of any optimizer of :mod:`torch.optim`::

        KFACPreconditioner(model, optimizer, damping=0.003)

    or, without ``optimizer``, ``preconditioner.step()`` between ``backward()`` and ``optimizer.step()``. After it
    ``p.grad`` of the layers holds the direction.

    Layers: Linear, Conv1d/2d/3d (any stride, padding, dilation, groups, padding mode), Embedding (diagonal A). All
    other parameters keep their gradients, among them the projections of MultiheadAttention, weights that layers of
    different kinds share, and frozen ones. So do layers whose factors would take more than an eighth of a
    rank's memory, with a warning.

    Devices: the CPU, or one CUDA device for all of these layers. There work is queued: a step waits for the device
    once, and again where inverses are made. Factors travel over NCCL. What was tried on a GPU: docs/guide/kfac.md.

    Conventions: a is a layer's input with a 1 appended for the bias, g the gradient of the *mean* loss at its output, N
    the samples, T the positions of a convolution or a sequence. A = (1/N) sum a a^T, G = (N/T) sum g g^T (KFC,
    Grosse & Martens 2016). Under gradient accumulation divide each loss by the number of micro-batches, as always; N is
    then that of all of them. ``factor_scaling="kfac-pytorch"`` takes the scale of gpauloski/kfac-pytorch instead
    (A smaller by T^3, G by N^2 T^2 for convolutions), so that a damping tuned there means the same here.

    Distributed: under DDP, or whenever a process group is there, factors are averaged over ranks in a group of
    K-FAC's own. Gradients must be the same on all ranks, as DDP makes them. All strategies but ``"dp"`` give the same
    result as one process with the whole batch.

    Args:
        model: the module, or DDP around it. Keep its layers: later replacements are not seen.
        optimizer: if given, its ``step()`` preconditions first; with a closure, after that. What it does not step now
            keeps its gradient, also if ``add_param_group`` brings it later. Not one that calls its closure several
            times, as LBFGS does.
        damping: lambda, above 0. Attribute; may be changed at any time, on all ranks alike.
        factor_decay: of the running averages, in [0, 1).
        martens_decay: min(1 - 1/k, factor_decay) in the k-th update instead, so that early batches count fully.
        factor_update_steps: steps from one update of the factors to the next, 1 or more.
        inverse_update_steps: the same of the inverses; a multiple of ``factor_update_steps``.
        kl_clip: kappa; directions are scaled by min(1, sqrt(kappa / |sum lr^2 <V, dW>|)). None: no clip. Attribute.
        method: ``"inverse"``: by Cholesky, with factored Tikhonov damping; ``"eigen"``: damping lambda on the product.
        strategy: who computes and sends what: ``"spd"``, ``"pad"``, ``"comm-opt"``, ``"mem-opt"``, ``"hybrid"``,
            ``"dp"``, ``"d-kfac"`` or ``"auto"``, the cheapest exact one by measured costs.
        worker_fraction: of the ranks that precondition a layer, above 0 up to 1; with ``"hybrid"`` and ``"auto"`` only,
            default 0.5.
        sequences: Linear on [N, T, in]: ``"expand"``, every position counts, or ``"reduce"``, inputs are averaged and
            gradients summed over them.
        factor_scaling: ``"kfc"`` or ``"kfac-pytorch"``.
        skip_layers: regular expressions for full names of modules to leave alone; each matches one or more.
        grad_scaler: the :class:`torch.amp.GradScaler` in use, whose scale is taken out of G. Needed where gradients
            are unscaled before the optimizer's step, where ``step()`` is called by hand, and where several
            preconditioners stand in front of one optimizer; else the optimizer is told.
        bucket_cap_mb: MiB of factors that travel together at most, above 0; default 25. Neither with ``"d-kfac"``,
            where
            each travels alone, nor with ``"dp"``.
        max_run_mb: the name of ``bucket_cap_mb`` until 0.1, for one release.
        split_directions: each rank computes a share of every direction's columns, and sends it to the others, where
            all would compute everything (never with ``"mem-opt"`` and ``"dp"``); ``"inverse"`` only. None: where that
            costs less. Same result.
        direction_precision: of the products that make a direction. ``"high"``: on a CPU with AMX a float32 is there the
            sum of two bfloat16, 16 bits, which takes a quarter to a half of the time; where some rank's CPU has none,
            on CUDA, in float64 and with ``"eigen"`` the same as ``"highest"``: float32 throughout.
        gather_rows: in steps that make no inverses the ranks gather the rows of which Linear layers' gradients are made
            (what each read, and the gradients at its output), and make directions of them, which with fewer rows than
            two thirds of a layer's width costs a fraction. None: where that costs less. A gradient that is not that of
            its rows (a penalty in the loss, another use of the weight, a clip by value, 16 bits) is taken whole, and
            ``row_directions_refused`` in ``stats()`` counts it. Same result. ``"inverse"`` only, on the CPU, and where
            all ranks make the same directions or shares of them (not ``"mem-opt"``, ``"dp"``, ``"d-kfac"``).
        shared_memory: what ranks exchange goes through memory where all are on one host and can map each other's; the
            same on all ranks. On the CPU.
        process_group: ranks to average over; default DDP's, else the default group. With one rank nothing is sent.

    Raises:
        ValueError: a value out of its range, with name, value and range; a pattern of ``skip_layers`` that is no
            regular expression or matches nothing; a lazy module without parameters; layers on several devices; LBFGS;
            an option that would mean nothing beside the others.
        TypeError: ``skip_layers`` is no list of patterns; an argument that is not known, with those that are.
        NoSupportedLayerError: no layer that K-FAC takes.
        torch.distributed.DistBackendError: ranks passed different models or options.
        RuntimeError: another rank could not build its part; a CUDA model on several ranks, and no NCCL in this torch.
        NotImplementedError: the model is neither on the CPU nor on a CUDA device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        damping: float = 0.003,
        factor_decay: float = 0.95,
        martens_decay: bool = False,
        factor_update_steps: int = 1,
        inverse_update_steps: int = 10,
        kl_clip: float | None = 1e-3,
        method: str = "inverse",
        strategy: str = "auto",
        worker_fraction: float | None = None,
        sequences: str = "expand",
        factor_scaling: str = "kfc",
        skip_layers: Sequence[str] = (),
        grad_scaler: torch.amp.GradScaler | None = None,
        bucket_cap_mb: float | None = None,
        max_run_mb: float | None = None,
        split_directions: bool | None = None,
        direction_precision: str = "high",
        gather_rows: bool | None = None,
        shared_memory: bool = True,
        process_group: dist.ProcessGroup | None = None,
        _failure: Exception | None = None,
        _inside: torch.optim.Optimizer | None = None,
        _queued: bool = False,
        **unknown: NoReturn,
    ) -> None:
        if not isinstance(model, nn.Module):
            # In place of a model, so that the other ranks are told.
            _failure = TypeError(
                f"{type(_inside or self).__name__}: model must be a torch.nn.Module, got {type(model).__name__}; pass "
                "the model itself, not model.parameters()"
            )
            model = nn.Module()
        module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        on_cuda = any(parameter.is_cuda for parameter in module.parameters())
        beside = group_beside(model, process_group)
        trains_in = model_backend(model, beside)
        group = own_group(beside, on_cuda)
        try:
            memory = least_of_ranks(group, trains_in, memory_here(module))
        except BaseException as error:
            holds, group = [None if on_cuda else group], None
            end_with(error, holds)
            raise
        inside = None if _inside is None else type(_inside).__name__
        failure = _failure
        bucket_cap_mb = max_run_mb if bucket_cap_mb is None else bucket_cap_mb
        try:
            # Python's own refusal would come before the others are told: they would wait for this rank in new_group().
            if unknown:
                raise TypeError(f"{type(self).__name__}: {no_such(unknown, ['optimizer', *KEYWORDS])}")
            if group is not None and on_cuda and not dist.is_nccl_available():
                raise RuntimeError("factors of a CUDA model travel over NCCL, which this build of torch does not have")
            numbers = dict[str, Any](
                damping=damping,
                factor_decay=factor_decay,
                martens_decay=martens_decay,
                kl_clip=kl_clip,
                factor_update_steps=factor_update_steps,
                inverse_update_steps=inverse_update_steps,
                method=method,
                factor_scaling=factor_scaling,
                strategy=strategy,
                worker_fraction=0.5 if worker_fraction is None else worker_fraction,
                bucket_cap_mb=25.0 if bucket_cap_mb is None else bucket_cap_mb,
                split_directions=split_directions,
                direction_precision=direction_precision,
                gather_rows=gather_rows,
                shared_memory=shared_memory,
                queued=_queued,
            )
            options = _C.KfacOptions(**{name: plain(value) for name, value in numbers.items()})
            check_together(
                optimizer,
                sequences=sequences,
                strategy=strategy,
                method=method,
                worker_fraction=worker_fraction,
                bucket_cap_mb=bucket_cap_mb,
                split_directions=split_directions,
            )
            stepped = stepped_by(optimizer or _inside)
            self._layers = find_layers(module, skip=skip_layers, sequences=sequences, stepped=stepped, memory=memory)
            check_devices(self._layers)
            if gather_rows and not any(isinstance(layer.modules[0], nn.Linear) for layer in self._layers):
                raise ValueError(
                    "gather_rows = True: allowed for models with Linear layers that K-FAC takes, and this has none; "
                    "leave it out"
                )
            if gather_rows and (on_cuda or _queued):
                raise ValueError("gather_rows = True: allowed for models on the CPU, and this is on CUDA; leave it out")
            self._own = {id(p) for layer in self._layers for p in (layer.weight, layer.bias) if p is not None}
            dear = dear_of(layer.weight for layer in self._layers)
            refusal = None if dear is None else refusal_of_dear(inside, dear._sharded)
            if refusal is not None:
                raise refusal
        except Exception as error:  # told to the other ranks first: they wait for this one
            failure = failure or error
        try:
            agree_that_all_can(group, trains_in, failure)
            self._engine = _C.KfacEngine([layer.spec for layer in self._layers], options, group, trains_in)
        except BaseException as error:
            holds, group = [None if on_cuda else group], None
            end_with(error, holds)
            raise
        end_after(self._engine, None if on_cuda else group)  # one rank alone cannot end NCCL's
        self._several = group is not None
        self._inside = inside
        self._in_front_of: weakref.ref[torch.optim.Optimizer] | None = None
        self._method = method
        self._scaling = factor_scaling
        self._grad_scaler = grad_scaler
        self._unseen = set(range(len(self._layers)))
        self._handles: list[Handle] = [*install_hooks(self._engine, self._layers, self._unseen)]
        # Hooks that outlived it would go on computing factors for nobody.
        self._remove = weakref.finalize(self, remove_all, self._handles)
        self._remove.atexit = False
        if optimizer is not None:
            self._handles += hook_before_step(optimizer, self)
            self._in_front_of = weakref.ref(optimizer)
        living.add(self)

    def step(
        self,
        param_groups: Iterable[Mapping[str, Any]] = (),
        *,
        lr: float = 1.0,
        loss_scale: float | None = None,
        unscale: bool = False,
        found_inf: bool = False,
    ) -> bool:
        """Updates factors and inverses where they are due, and writes directions into ``.grad``. Collective.

        Args:
            param_groups: of the optimizer that follows: their ``lr`` is what the KL clip needs, and their other
                gradients are checked too. Default: ``lr`` for every layer.
            lr: the learning rate, without ``param_groups`` only.
            loss_scale: what the loss was multiplied with; default: that of ``grad_scaler``, else 1.
            unscale: gradients still have that factor, and lose it here.
            found_inf: a gradient is known not to be finite.

        Returns:
            False if a gradient is not finite: nothing was changed, on no rank, and the optimizer must not step.
        """
        if loss_scale is None:
            loss_scale = self._grad_scaler.get_scale() if self._grad_scaler is not None else 1.0
        rates: dict[int, float] = {}
        others: list[Tensor] = []
        grouped = list(param_groups)
        if grouped and lr != 1.0:
            raise ValueError(f"lr = {lr}: allowed without param_groups, which have their own; leave one of them out")
        for layer in self._layers:
            for parameter in (layer.weight, layer.bias):
                _ = None if parameter is None else parameter.grad  # "dear" makes it the averaged one, which C++ reads
        for group in grouped:
            rate = float(group["lr"])
            for parameter in group["params"]:
                if id(parameter) in self._own:
                    rates[id(parameter)] = rate
                elif parameter.grad is not None:
                    others.append(parameter.grad)
        # Where only the weight is frozen in training, its bias is one of them.
        others += [
            layer.bias.grad
            for layer in self._layers
            if layer.weight.grad is None and layer.bias is not None and layer.bias.grad is not None
        ]
        if self._unseen:
            self._look_for_unseen()
        of_layers = [rates.get(id(layer.weight), 0.0) if grouped else lr for layer in self._layers]
        return self._engine.step(of_layers, others, loss_scale, 1.0 / loss_scale if unscale else 1.0, found_inf)

    def _look_for_unseen(self) -> None:
        missed = sorted(index for index in self._unseen if self._layers[index].weight.grad is not None)
        if missed:
            self._unseen.difference_update(missed)  # said once
            names = ", ".join(self._layers[index].name for index in missed)
            warnings.warn(
                f"K-FAC has seen no call of {names}, which have gradients: their factors stay as they are. A compiled "
                "model that has run before does not notice new hooks: make the optimizer first, or call "
                "torch.compiler.reset(). skip_layers leaves layers to the plain gradient",
                stacklevel=3,
            )

    def __getstate__(self) -> NoReturn:
        """Copies and pickles would share its engine or have none, and nothing that sees their model: there are none.

        Raises:
            TypeError: always.
        """
        raise no_copies(self)

    def discard(self) -> None:
        """Forgets what backward passes have left since the last step (one that a gradient scaler skipped, say).

        ``zero_grad()`` of K-FAC's own optimizers does it. ``model.zero_grad()`` and ``p.grad = None`` are not seen:
        call it then, on all ranks alike.
        """
        self._engine.discard()

    def remove(self) -> None:
        """Takes all hooks away; the model and the optimizer are then what they were."""
        living.discard(self)
        self._remove()

    def _belongs_to(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is a part of this optimizer, or stands in front of it."""
        before = None if self._in_front_of is None else self._in_front_of()
        return before is optimizer or getattr(optimizer, "kfac", None) is self

    def _preconditions(self, parameters: Collection[int]) -> bool:
        """Whether a parameter with one of these ids is among those of its layers."""
        return not self._own.isdisjoint(parameters)

    @property
    def damping(self) -> float:
        """Lambda; set it on all ranks alike."""
        return self._engine.damping

    @damping.setter
    def damping(self, value: float) -> None:
        self._engine.damping = plain(value)

    @property
    def kl_clip(self) -> float | None:
        """Kappa, or None; set it on all ranks alike."""
        return self._engine.kl_clip

    @kl_clip.setter
    def kl_clip(self, value: float | None) -> None:
        self._engine.kl_clip = plain(value)

    @property
    def layers(self) -> list[str]:
        """Names of the modules that are preconditioned."""
        return [layer.name for layer in self._layers]

    def plan(self) -> KFACPlan:
        """Who computes and sends what, with fitted costs, predicted and measured times. Print it."""
        return KFACPlan(self._engine.plan(), self.stats())

    def stats(self) -> dict[str, Any]:
        """Counters since the start, of this rank.

        ``steps``, ``skipped`` (not finite, on all ranks), ``factors_left_out`` (overflowed on this rank alone),
        ``factor_updates`` (steps in which they were due), ``inverse_updates``, ``inverses_retried`` (in float64),
        ``inverses_kept`` (failed; the last good one was used), ``row_directions`` (of layers, made of rows),
        ``row_directions_refused`` (their gradients were not those of rows), ``row_directions_ahead`` (of those made:
        written before ``step()``), ``clip`` (of the last step), ``runs`` and ``runs_overlapped`` (that left during a
        backward pass), ``*_bytes`` of the tensors passed to collectives, ``memory_bytes`` of K-FAC's own buffers,
        ``*_seconds`` (of the host: on CUDA they end when the work is queued).
        On CUDA it waits for the device.
        """
        return self._engine.stats()

    def state_dict(self) -> dict[str, Any]:
        """Factors (their mean over ranks), inverses, and the attributes. Collective; the same on all ranks."""
        stats = self.stats()
        factors = self._engine.state()
        return {
            "version": VERSION,
            "method": self._method,
            "factor_scaling": self._scaling,
            "layers": self._described_layers(),
            "steps": stats["steps"],
            "factor_updates": stats["factor_updates"],
            "damping": self.damping,
            "kl_clip": self.kl_clip,
            "factors": factors,
        }

    def _described_layers(self) -> list[tuple[str, list[int], bool]]:
        return [(layer.name, list(layer.weight.shape), layer.bias is not None) for layer in self._layers]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises :class:`torchext.errors.KFACStateError` if ``load_state_dict`` would. Local."""
        # The plan knows the sizes of factors without a collective, which state() is.
        factors = self._engine.plan()["factors"]
        check_state(state, method=self._method, scaling=self._scaling, layers=self._described_layers(), factors=factors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict()`` gave at any world size and under any strategy.

        ``damping`` and ``kl_clip`` are then what they were, as an optimizer's learning rate is.

        Raises:
            KFACStateError: it is none, or one of another model or method; nothing was loaded.
        """
        self.check_state(state)
        self._engine.load(state["factors"], plain(state["steps"]), plain(state["factor_updates"]))
        self.damping = state.get("damping", self.damping)
        self.kl_clip = state.get("kl_clip", self.kl_clip)


# What can be passed to it by name.
KEYWORDS = [
    name
    for name, parameter in inspect.signature(KFACPreconditioner.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and not name.startswith("_")
]
