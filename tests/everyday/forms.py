"""The forms on which a script runs: two references by plain DDP over Gloo, and every backend that is exactly that.

With two ranks ``prague`` (static groups, order atc), ``dssync`` (atc) and ``hop`` (serial, on a ring) average all
parameters after every step. That is plain DDP where a step is linear in the gradients, which is SGD without clipping.
Where it is not, their reference is ``local``: gradients stay each rank's own, and Gloo averages parameters after steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext import auto
from torchext.auto import candidates, live_choice

REFERENCE, LOCAL, CHOOSING = "gloo", "local", "torchext"
DEAR = ("dear-sharded", "dear-replicated", "dear-default")
AVERAGING = ("prague", "dssync", "hop")
FORMS = (*AVERAGING, *DEAR)  # CHOOSING is plain DDP first, and then one of dear's

# Small enough that every model has several buckets.
BUCKET_MB = 0.001


def backend_name(form: str) -> str:
    return "gloo" if form == LOCAL else form.partition("-")[0]


def options(form: str, timeout: timedelta) -> Any:
    """``pg_options`` of a form; None for the references."""
    makers: dict[str, Callable[[], Any]] = {
        "prague": lambda: torchext.PragueOptions(generator="static", order="atc", timeout=timeout),
        "dssync": lambda: torchext.DSSyncOptions(order="atc", timeout=timeout),
        "hop": lambda: torchext.HopOptions(order="serial", graph="ring", timeout=timeout),
        "dear-sharded": lambda: torchext.DeAROptions(
            allreduce_fallback=False, form="sharded", bucket_mb=BUCKET_MB, timeout=timeout
        ),
        "dear-replicated": lambda: torchext.DeAROptions(
            allreduce_fallback=False, form="replicated", bucket_mb=BUCKET_MB, timeout=timeout
        ),
        "dear-default": lambda: torchext.DeAROptions(timeout=timeout),
        CHOOSING: lambda: torchext.DeAROptions(allreduce_fallback=False, timeout=timeout),
    }
    return makers[form]() if form in makers else None


class PlainSync:
    """What a synchronizer is where plain DDP keeps replicas the same: nothing to do."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self._ddp, self._optimizer = ddp, optimizer

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def detach(self) -> None: ...

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        yield self._ddp.module

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(held, max_norm, norm_type)


def _ready(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


class LocalSync(PlainSync):
    """Decentralized training by the book: own gradients, then the average of all parameters."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(ddp, optimizer)
        ddp.register_comm_hook(None, lambda _, bucket: _ready(bucket.buffer()))
        # A parameter that another rank alone has used has no gradient here; the reducer would make it zero.
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ddp.reducer._update_process_group(alone)
        self._handle: Any = optimizer.register_step_post_hook(self._average)

    def _average(self, *_: object) -> None:
        for parameter in self._ddp.parameters():
            dist.all_reduce(parameter.data)
            parameter.data.div_(dist.get_world_size())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        state = self._optimizer.state
        held = [p for p in self._ddp.parameters() if p.requires_grad or p in state]
        own = [dict(state.get(p, {})) for p in held]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        for parameter, *values in zip(held, *of_ranks, strict=True):
            if any(values):
                state[parameter] = _average(values)
        yield self._ddp.module
        for parameter, values in zip(held, own, strict=True):
            state.pop(parameter, None)
            if values:
                state[parameter] = values

    def detach(self) -> None:
        self._handle.remove()


def _average(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one parameter: of tensors the mean, where who has none counts as zeros, and the most steps."""
    having = [state for state in states if state]
    average = {}
    for name, first in having[0].items():
        values = [state[name] for state in having]
        if not isinstance(first, torch.Tensor):
            average[name] = first
        elif first.dim():
            average[name] = sum(values) / len(states)
        elif all(value == value.round() for value in values):
            average[name] = max(values)
        else:
            average[name] = sum(values) / len(having)
    return average


_SECONDS = auto.OperationTable(((4096, 1e-4), (65536, 1e-3)))
_LINKS = auto.LinkModel(
    backend=CHOOSING,
    device="cpu",
    host_of=(0, 0),
    tables=dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), _SECONDS),
    latency_seconds=1e-4,
    bytes_per_second=1e8,
    copy_bytes_per_second=1e9,
    operations_per_second=1e10,
)


def attach_choosing(ddp: DistributedDataParallel, optimizer: Any) -> Any:
    """On the backend ``torchext``, which decides after two passes here, for ``dear`` where that can train the model."""
    search = candidates.search

    def choose(*given: Any, **others: Any) -> list[auto.Candidate]:
        found = search(*given, **others)
        wanted = next((c for c in found if c.possible and c.way == "dear" and not c.factor_layers), None)
        return [dataclasses.replace(c, chosen=c is wanted) if wanted else c for c in found]

    live_choice._WARM_UP_STEPS, live_choice._BEFORE = 1, 2
    live_choice.search = choose
    live_choice.calibrate = lambda *_, **__: _LINKS
    return torchext.attach(ddp, optimizer)


def attacher(form: str) -> Callable[..., Any]:
    return {REFERENCE: PlainSync, LOCAL: LocalSync, CHOOSING: attach_choosing}.get(form, torchext.attach)
