"""Models on GPUs train as they do on the CPU, by every backend; calls on CUDA tensors; a peer that dies meanwhile."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import batch, equal_everywhere, mlp, new_group
from case_choice import slow_on
from elastic_training import ElasticTraining
from gpus import NO_GPU, take_gpu
from harness import Rank, launch
from largest import largest
from rows import row_values
from sharded import FORMS, Branches, Pair, Residual, Shuffled, Transformer, adagrad, adamw, made, sgd
from sharded import mlp as classifier
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = NO_GPU
SIZES = [1, 2, 3]
BACKENDS = ["prague", "hop", "dssync", "dear"]
STEPS = 12


# ---- Calls ----


def body_calls(rank: Rank, backend: str) -> None:
    device = take_gpu(rank)
    rank.init(backend)
    size, total = rank.size, sum(range(1, rank.size + 1))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.full((1000,), rank.rank + 1, dtype=dtype, device=device)
        summed = mine.clone()
        dist.all_reduce(summed)
        assert (summed == total).all()
        dist.broadcast(mine, src=size - 1)
        assert (mine == size).all()
        mine.fill_(rank.rank + 1)
        gathered = torch.empty(size * 1000, dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, mine)
        assert (gathered.view(size, 1000) == torch.arange(1, size + 1, device=device)[:, None]).all()
        scattered = torch.empty_like(mine)
        dist.reduce_scatter_tensor(scattered, gathered)
        assert (scattered == size * (rank.rank + 1)).all()
    on_host = torch.ones(3)
    dist.all_reduce(on_host)  # the same group carries both
    assert (on_host == size).all()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", SIZES)
def test_calls_on_cuda_tensors(size: int) -> None:
    row_values(body_calls, size, {backend: (backend,) for backend in BACKENDS})


# ---- Attached models ----


class Net(nn.Module):
    """With buffers, which workers average too, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def trained(rank: Rank, device: torch.device, backend: str, options: dict[str, Any], on: Any = None) -> torch.Tensor:
    """All state of one model after STEPS steps, on the host. on: the stream of the training."""
    module = Net().to(device)
    ddp = DistributedDataParallel(module, process_group=new_group(backend, **options))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    sync = torchext.attach(ddp, optimizer, bucket_mb="auto" if backend == "hop" else 0.001)
    with torch.cuda.stream(on) if on is not None else contextlib.nullcontext():
        for step in range(STEPS):
            inputs, targets = (part.to(device) for part in batch(rank.rank, step))
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
        sync.wait()
        found = torch.cat([value.detach().double().reshape(-1) for value in module.state_dict().values()]).cpu()
        sync.synchronize()
        equal_everywhere(module)
    sync.detach()
    return found


# Whose groups are the same for every run.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "prague cta": ("prague", {"generator": "static"}),
    "prague atc": ("prague", {"generator": "static", "order": "atc"}),
    "hop": ("hop", {}),
    "hop serial": ("hop", {"order": "serial"}),
    "dssync": ("dssync", {}),
    "dear": ("dear", {"allreduce_fallback": False}),
    "dear replicated": ("dear", {"allreduce_fallback": False, "form": "replicated"}),
    "dear fallback": ("dear", {}),
}


def body_trained(rank: Rank, case: str) -> tuple[float, float]:
    """How far the GPU's model is from the CPU's: on the default stream, and on one of its own."""
    device = take_gpu(rank)
    backend, options = CASES[case]
    rank.init(backend)
    expected = trained(rank, torch.device("cpu"), backend, options)
    runs = [trained(rank, device, backend, options, on) for on in (None, torch.cuda.Stream(device))]
    first, second = (float((run - expected).abs().max()) for run in runs)
    return first, second


@pytest.mark.parametrize("size", SIZES)
def test_a_model_on_a_gpu_trains_as_on_the_cpu(size: int) -> None:
    for case, differences in row_values(body_trained, size, {case: (case,) for case in CASES}).items():
        assert all(largest(own) < 1e-5 for own in differences), (case, differences)


def body_random_groups(rank: Rank, dtype: torch.dtype) -> bool:
    device = take_gpu(rank)
    rank.init("prague")
    module = mlp().to(device, dtype)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    sync = torchext.attach(ddp, optimizer)
    losses = []
    for step in range(60):
        inputs, targets = (part.to(device, dtype) for part in batch(rank.rank, step % 5))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    sync.synchronize()
    equal_everywhere(module)
    return sync.stats()["averages"] > 0 and losses[-1] < losses[0] / 2


def test_random_groups_on_a_gpu() -> None:
    rows = {str(dtype): (dtype,) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    for dtype, trained_well in row_values(body_random_groups, 3, rows).items():
        assert trained_well == [True] * 3, dtype


# ---- dear against one process with the whole batch, on the same device ----


def on_gpu(rank: Rank, form: str, body: Any) -> Any:
    Pair.device, Pair.form = take_gpu(rank), form
    rank.init("dear")
    return body(rank)


def body_dear(rank: Rank) -> dict[str, float]:
    """Few of them: each makes two communicators."""
    worst = {
        "Residual": Pair(rank, made(Residual), sgd).run(20).done(),
        "Transformer": Pair(rank, made(Transformer), adamw).run(20).done(),
        "Shuffled": Pair(rank, made(Shuffled), adagrad).run(20).done(),
        "Branches": Pair(rank, made(Branches), sgd, find_unused_parameters=True).run(20).done(),
    }
    for option in ("fused", "capturable"):
        pair = Pair(rank, made(classifier), lambda p, o=option: torch.optim.AdamW(p, lr=0.01, **{o: True}))
        worst[option] = pair.run(8).done()
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_dear_is_one_process(size: int) -> None:
    for form, found in row_values(on_gpu, size, {form: (form, body_dear) for form in FORMS}, deadline=90).items():
        for worst in found:
            assert largest(worst.values()) < 1e-5, (form, worst)


def body_scaled(rank: Rank) -> tuple[float, list[float]]:
    pair = Pair(rank, made(classifier), sgd)
    scales = pair.run_scaled()
    return pair.done(), scales


def test_dear_with_a_gradient_scaler() -> None:
    for form, found in row_values(on_gpu, 2, {form: (form, body_scaled) for form in FORMS}).items():
        for difference, scales in found:
            assert difference < 1e-5, form
            assert len(set(scales)) > 1, form


# ---- Peers that die ----


def body_dies(rank: Rank, backend: str) -> str:
    device = take_gpu(rank)
    rank.init(backend)
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    rank.report("ready")
    rank.pause()
    started = time.monotonic()
    try:
        while True:
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            assert time.monotonic() < started + 15
            time.sleep(0.05)
    except dist.DistBackendError as error:
        return str(error)


# DelegatingBackend tells of it, on all of them.
@pytest.mark.parametrize("meanwhile", [False, True], ids=["between calls", "in a call"])
@pytest.mark.parametrize("backend", slow_on(BACKENDS, "hop", "dssync", "dear"))
def test_a_dead_peer_is_named(backend: str, meanwhile: bool) -> None:
    with launch(body_dies, 2, backend) as ranks:
        ranks.expect("ready")
        if meanwhile:  # its kernel waits on the GPU for a peer that never calls, until the communicator is aborted
            ranks.proceed([0])
            time.sleep(1.0)
        ranks.kill(1)
        if not meanwhile:
            time.sleep(1.0)
            ranks.proceed([0])
        outcome = ranks.outcomes([0], deadline=20)[0]
        assert outcome.ok, outcome.trace
        assert "rank 1" in outcome.value, outcome.value


def body_goes_on(rank: Rank, backend: str) -> tuple[list[int], int, bool]:
    device = take_gpu(rank)
    options = {"group_size": 2} if backend == "prague" else {}
    going = ElasticTraining(rank, backend, options, module=mlp().to(device))
    going.train(10)
    going.sync.synchronize()
    rank.report("trained")
    rank.pause()
    going.meet_until(lambda stats: stats["workers"] == 2)
    going.train(10)
    going.sync.synchronize()
    equal_everywhere(going.ddp.module)
    stats = going.sync.stats()
    return stats["lost_ranks"], stats["workers"], next(going.ddp.parameters()).is_cuda


# dssync has the synchronizer's class of prague.
@pytest.mark.parametrize("backend", slow_on(["prague", "hop", "dssync"], "dssync"))
def test_training_goes_on_without_the_dead(backend: str) -> None:
    with launch(body_goes_on, 3, backend) as ranks:
        ranks.expect("trained")
        ranks.kill(0)
        ranks.proceed([1, 2])
        for outcome in ranks.outcomes([1, 2]):
            assert outcome.ok, outcome.trace
            assert outcome.value == ([0], 2, True)
