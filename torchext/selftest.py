"""``python -m torchext`` runs this: two processes on this machine, one prague group, the calls training depends on."""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["run"]

WORLD_SIZE = 2
ELEMENTS = 1 << 20
REPEATS = 5
TIMEOUT = timedelta(seconds=60)


def _expect(what: str, tensor: torch.Tensor, value: float) -> None:
    if not torch.equal(tensor, torch.full_like(tensor, value)):
        raise RuntimeError(f"{what}: expected {value} everywhere, got {tensor.min().item()} to {tensor.max().item()}")


def _timed(what: str, rank: int, milliseconds: list[float]) -> None:
    if rank == 0:
        size = ELEMENTS * 4 >> 20
        best, worst = min(milliseconds), max(milliseconds)
        print(f"  {what:<20} {size} MiB, {WORLD_SIZE} ranks: {best:.1f} to {worst:.1f} ms", flush=True)


def _worker(rank: int, store: str) -> None:
    from torchext import _C
    from torchext.backends import backend_of

    started = time.perf_counter()
    dist.init_process_group("prague", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=TIMEOUT)
    if rank == 0:
        print(f"  init_process_group   {(time.perf_counter() - started) * 1e3:.0f} ms", flush=True)

    milliseconds = []
    for _ in range(REPEATS):
        tensor = torch.full((ELEMENTS,), float(rank + 1), device="cpu")
        started = time.perf_counter()
        dist.all_reduce(tensor)
        milliseconds.append((time.perf_counter() - started) * 1e3)
        _expect("all_reduce", tensor, 3.0)
    _timed("all_reduce", rank, milliseconds)

    backend = backend_of(dist.group.WORLD)
    assert isinstance(backend, _C.ProcessGroupPrague)
    milliseconds = []
    for _ in range(REPEATS):
        tensor = torch.full((ELEMENTS,), float(rank + 1), device="cpu")
        started = time.perf_counter()
        backend.partial_all_reduce(tensor, [0, 1]).wait()
        milliseconds.append((time.perf_counter() - started) * 1e3)
        _expect("partial_all_reduce", tensor, 1.5)
    _timed("partial_all_reduce", rank, milliseconds)
    dist.destroy_process_group()


def run() -> None:
    """Runs the self-test and prints its timings.

    Raises:
        Exception: what the first failing process raised, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_worker, args=(str(Path(folder, "store")),), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
