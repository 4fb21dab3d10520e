"""A rank that lives for many scripts: a job comes by its line, it makes a process group, runs the script, and tells.

A script is the source of a training loop. What its names mean stands in ``namespace``; what it leaves in ``model`` and
what it hands to ``same`` and ``mine`` is its result.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import time
import traceback
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import forms
import numpy as np
import torch
import torch.distributed as dist
from harness import Rank
from nets import Net, flat
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import torchext


@dataclass(frozen=True)
class Job:
    source: str
    form: str
    prefix: str  # of the store, the case's own
    timeout_s: float
    double: bool


@dataclass
class Told:
    """How a script ended on one rank."""

    error: str = ""  # the exception's type; empty: none
    message: str = ""
    trace: str = ""
    ours: bool = False  # raised by torchext's own code
    seconds: float = 0.0
    # Values by name: those that plain DDP has alike on all ranks; those that are each rank's own with averaging.
    same: dict[str, np.ndarray] = field(default_factory=dict)
    mine: dict[str, np.ndarray] = field(default_factory=dict)
    closing: str = ""  # the error of the end, after the script


def _array(value: Any) -> np.ndarray:
    return flat(value if isinstance(value, (list, tuple)) or not isinstance(value, torch.Tensor) else [value]).numpy()


def namespace(job: Job, rank: int, told: Told, syncs: list[Any]) -> dict[str, Any]:
    attach_form = forms.attacher(job.form)

    def attach(ddp: Any, optimizer: Any) -> Any:
        syncs.append(attach_form(ddp, optimizer))
        return syncs[-1]

    def same(value: Any) -> None:
        told.same[f"{len(told.same)}"] = _array(value)

    def mine(value: Any) -> None:
        told.mine[f"{len(told.mine)}"] = _array(value)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(5, 4), torch.randn(5, 2)

    return {
        "torch": torch,
        "nn": nn,
        "F": functional,
        "dist": dist,
        "DDP": DistributedDataParallel,
        "Net": Net,
        "copy": copy,
        "io": io,
        "contextlib": contextlib,
        "defaultdict": defaultdict,
        "torchext": torchext,
        "rank": rank,
        "attach": attach,
        "batch": batch,
        "same": same,
        "mine": mine,
        "flat": flat,
    }


def _is_ours(error: BaseException) -> bool:
    """Whether torchext's own code raised it, and not one of the collectives under it."""
    home = str(Path(torchext.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    raised_here = bool(frames) and frames[-1].filename.startswith(home)
    named = any(word in str(error) for word in ("torchext", *torchext.backends.BACKENDS))
    kinds = (RuntimeError, ValueError, TypeError, NotImplementedError)
    return (raised_here or named) and isinstance(error, kinds) and not isinstance(error, dist.DistError)


def run(job: Job, rank: int, world: int, store: dist.Store, tell: Any) -> None:
    """Runs the job; tells how it ended, and then that it has closed."""
    told, syncs = Told(), []
    start = time.monotonic()
    torch.set_default_dtype(torch.float64 if job.double else torch.float32)
    timeout = timedelta(seconds=job.timeout_s)
    names: dict[str, Any] = {}
    try:
        dist.init_process_group(
            forms.backend_name(job.form),
            store=dist.PrefixStore(job.prefix, store),
            rank=rank,
            world_size=world,
            timeout=timeout,
            pg_options=forms.options(job.form, timeout),
        )
        names = namespace(job, rank, told, syncs)
        exec(compile(job.source, "<script>", "exec"), names)
        for name in ("model", "critic"):
            if name in names:
                told.same[name] = flat(names[name]).numpy()
                told.mine[name + " buffers"] = flat(names[name].buffers()).numpy()
    except Exception as error:  # what it is, is the question
        told.error, told.message, told.trace = type(error).__name__, str(error), traceback.format_exc()
        told.ours = _is_ours(error)
    told.seconds = time.monotonic() - start
    tell(told)
    names.clear()
    closing = ""
    try:
        if not told.error:
            for sync in syncs:
                sync.detach()
        syncs.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        closing = traceback.format_exc()
    torch.set_default_dtype(torch.float32)
    gc.collect()
    tell(closing)


def serve(rank: Rank, port: int) -> None:
    """The rank's body: jobs until the line ends."""
    gc.collect()
    gc.freeze()  # a collection after each job then looks at that job's objects alone
    warnings.simplefilter("ignore")
    log = os.open(rank.folder / f"log of {rank.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    line = rank._line
    while (job := line.recv()) is not None:
        run(job, rank.rank, rank.size, store, lambda what: line.send(("report", what)))
