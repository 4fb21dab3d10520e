"""What attach refuses, with which words, and what it does when ranks disagree."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import at_once, new_group
from harness import Rank, elapsed_error, run_ranks
from rows import row_values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.backends import BACKENDS, is_wrapped
from torchext.optim import SPDKFAC, KFACPreconditioner

DEADLINE = 10.0


def prague(**options: Any) -> dist.ProcessGroup:
    return dist.new_group(backend="prague", timeout=timedelta(seconds=20), pg_options=torchext.PragueOptions(**options))


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# ---- What one rank can see ----


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def body_refused(rank: Rank) -> bool:
    with pytest.raises(ValueError, match=r"group_size must be at most 2, the group's ranks, got 3"):
        rank.init(store="too large", pg_options=torchext.PragueOptions(group_size=3))
    rank.init()
    backend = torchext.backend_of()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    ddp = DistributedDataParallel(model)
    with pytest.raises(TypeError, match="takes a DistributedDataParallel model, got Sequential; wrap the model"):
        torchext.attach(model, sgd(model))
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, or a list of them, got Parameter"):
        torchext.attach(ddp, list(model.parameters()))
    with pytest.raises(ValueError, match=r"does not own 2 of the model's trainable parameters \(1\.weight, 1\.bias\)"):
        torchext.attach(ddp, sgd(model[0]))
    for bucket_mb in (0, -1, 5000, float("nan")):
        with pytest.raises(ValueError, match=f"bucket_mb must be .auto. or in .*, got {bucket_mb}"):
            torchext.attach(ddp, sgd(ddp), bucket_mb=bucket_mb)
    gloo = dist.new_group(backend="gloo")
    ordinary = DistributedDataParallel(nn.Linear(4, 1), process_group=gloo)
    with pytest.raises(ValueError, match=r"backend is 'gloo'.*prague"):
        torchext.attach(ordinary, sgd(ordinary))
    synced = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    synced.module[1] = nn.SyncBatchNorm(4)  # later, as DDP takes none on a CPU
    with pytest.raises(ValueError, match=r"'1' is a SyncBatchNorm.*Use BatchNorm"):
        torchext.attach(synced, sgd(synced))
    numbers = DistributedDataParallel(Complex(), init_sync=False)
    with pytest.raises(TypeError, match=r"parameter 'weight' is torch\.complex64"):
        torchext.attach(numbers, sgd(numbers))
    hooked = DistributedDataParallel(nn.Linear(4, 1))
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="has a communication hook"):
        torchext.attach(hooked, sgd(hooked))
    factored = DistributedDataParallel(nn.Linear(4, 1))
    plain = sgd(factored)
    in_front = KFACPreconditioner(factored, plain)
    for kfac in (SPDKFAC(factored), plain):
        with pytest.raises(ValueError, match=r"K-FAC exchanges factors .* process_group=dist\.new_group"):
            torchext.attach(factored, kfac)
    in_front.remove()
    torchext.attach(factored, plain).detach()
    factored = DistributedDataParallel(nn.Linear(4, 1))
    alone = dist.new_group([rank.rank], use_local_synchronization=True)
    own_factors = SPDKFAC(factored, process_group=alone)
    torchext.attach(factored, own_factors).detach()

    # None of it has left a trace: the model attaches, once.
    assert backend.failure == (-1, "")
    optimizer = sgd(ddp)
    sync = torchext.attach(ddp, optimizer)
    with pytest.raises(RuntimeError, match="attached already"):
        torchext.attach(ddp, optimizer)
    step(ddp, optimizer)
    sync.synchronize()
    sync.detach()
    return True


def test_refused_at_once() -> None:
    assert run_ranks(body_refused, 2) == [True] * 2


def body_detail(rank: Rank, backend: str) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    rank.init(backend, pg_options=at_once(backend))
    assert is_wrapped(dist.group.WORLD)
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = sgd(ddp)
    sync = torchext.attach(ddp, optimizer)
    for _ in range(6):
        step(ddp, optimizer)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [2.0, 2.0]
    sync.detach()


def test_the_debug_mode_in_which_torch_has_all_ranks_meet() -> None:
    """With all backends but prague, which is refused (tests/python)."""
    row_values(body_detail, 2, {backend: (backend,) for backend in BACKENDS if backend != "prague"})


def body_after_the_end(rank: Rank, backend: str) -> None:
    rank.init(backend, pg_options=at_once(backend))
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = sgd(ddp)
    sync = torchext.attach(ddp, optimizer)
    if backend in ("dssync", "hop"):
        with pytest.raises(RuntimeError, match=rf"{backend}: .*join\(\) is not supported"), ddp.join():
            pass
    step(ddp, optimizer)
    dist.destroy_process_group()
    for call in (sync.synchronize, lambda: sync.averaged().__enter__(), sync.synchronize):
        with pytest.raises((RuntimeError, dist.DistBackendError), match=r"detached|shut down|ended"):
            call()
    sync.stats()
    sync.detach()


def test_after_the_end_of_the_group() -> None:
    row_values(body_after_the_end, 2, {backend: (backend,) for backend in BACKENDS})


# ---- What only a comparison of ranks can see ----


class Buffered(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.zeros(size))


def body_disagreement(rank: Rank) -> list[tuple[str, str, str, float]]:
    rank.init()
    odd = rank.rank == 2
    errors = []

    def attach(word: str, model: nn.Module, bucket_mb: float = 4.0, **options: Any) -> None:
        group = prague(**options)
        # init_sync: DDP's own comparison of parameters would come first.
        ddp = DistributedDataParallel(model, process_group=group, init_sync=False)
        errors.append((word, *elapsed_error(lambda: torchext.attach(ddp, sgd(ddp), bucket_mb=bucket_mb))))
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [3.0, 3.0]

    model = nn.Linear(4, 1)
    attach("PragueOptions.group_size is 2 on rank 0 and 3 on rank 2", model, group_size=3 if odd else 2)
    attach(
        "PragueOptions.generator is smart on rank 0 and random on rank 2", model, generator="random" if odd else "smart"
    )
    attach(
        "PragueOptions.generator is smart on rank 0 and static on rank 2", model, generator="static" if odd else "smart"
    )
    attach("PragueOptions.order is atc on rank 0 and cta on rank 2", model, order="cta" if odd else "atc")
    attach(
        "PragueOptions.slowdown_threshold is 4 on rank 0 and 7 on rank 2", model, slowdown_threshold=7 if odd else -1
    )
    attach("PragueOptions.sync_period is 1 on rank 0 and 2 on rank 2", model, sync_period=2 if odd else 1)
    attach("PragueOptions.sync_every is -1 on rank 0 and 9 on rank 2", model, sync_every=9 if odd else -1)
    attach("PragueOptions.seed is 1 on rank 0 and 2 on rank 2", model, seed=2 if odd else 1)
    attach("bucket bytes is 1048576 on rank 0 and 2097152 on rank 2", model, bucket_mb=2 if odd else 1)
    attach("number of parameters is 2 on rank 0 and 1 on rank 2", nn.Linear(4, 1, bias=not odd))
    attach("parameters[0] is Float[1, 4] on rank 0 and Float[1, 5] on rank 2", nn.Linear(5 if odd else 4, 1))
    attach(
        "parameters[0] is Float[1, 5] on rank 0 and Float[3, 1] on rank 2", nn.Linear(1, 3) if odd else nn.Linear(5, 1)
    )
    of_images = nn.Conv2d(2, 2, 2)
    attach(
        "Float[2, 2, 2, 2] with strides [8, 1, 4, 2] on rank 2",
        of_images.to(memory_format=torch.channels_last) if odd else of_images,
    )
    attach("buffers[0] is Float[3] on rank 0 and Float[4] on rank 2", Buffered(4 if odd else 3))
    return errors


def test_ranks_that_disagree() -> None:
    for errors in run_ranks(body_disagreement, 3):
        for word, kind, text, seconds in errors:
            assert kind == "DistBackendError", text
            assert word in text and "rank 2" in text, (word, text)
            assert seconds < DEADLINE


def body_moved(rank: Rank) -> list[tuple[str, str, float]]:
    rank.init()
    errors = []
    for what, backend in itertools.product(("parameter", "buffer", "order"), ("prague", "hop")):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        ddp = DistributedDataParallel(model, process_group=new_group(backend))
        optimizer = sgd(ddp)
        torchext.attach(ddp, optimizer)
        step(ddp, optimizer)
        if what == "parameter":
            model[0].weight.data = model[0].weight.data.double()
        elif what == "buffer":
            model[1].running_mean.data = model[1].running_mean.data.double()
        else:  # which DDP's reducer would not follow
            model[0].weight.data = model[0].weight.data.t().contiguous().t()
        errors.append(elapsed_error(optimizer.step))
    return errors


def test_tensors_given_other_memory() -> None:
    for errors in run_ranks(body_moved, 2):
        for (kind, text, seconds), index in zip(errors, (0, 0, 4, 4, 0, 0), strict=True):
            assert kind == "RuntimeError"
            assert f"parameter or buffer {index} " in text and "before it is wrapped" in text, text
            assert seconds < DEADLINE
