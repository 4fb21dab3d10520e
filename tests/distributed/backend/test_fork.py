"""A forked child of a process with a group: calls raise at once, collection detaches, and the parent goes on."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_choice import quick_on
from harness import Rank, run_ranks

import torchext

pytestmark = pytest.mark.sanitize


def in_fork(work: Any) -> str:
    """What `work` returned in a forked child; the empty string if the child did not end by itself."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "no answer"
        try:
            text = str(work())
        except BaseException as error:  # told to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def body_fork(rank: Rank, backend_name: str) -> Any:
    rank.init(backend_name)
    dist.all_reduce(torch.ones(1))
    start = time.monotonic()

    def collective() -> None:
        dist.all_reduce(torch.ones(1))

    def point_to_point() -> None:
        dist.send(torch.ones(1), dst=(rank.rank + 1) % rank.size)

    def abort_and_shutdown() -> str:
        backend = torchext.backend_of()
        backend.abort()
        backend.shutdown()
        return "returned"

    def destroy() -> str:
        dist.destroy_process_group()
        gc.collect()
        return "destroyed"

    answers = [in_fork(work) for work in (collective, point_to_point, abort_and_shutdown, destroy)]
    took = time.monotonic() - start
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return answers, took, tensor.tolist(), torchext.backend_of().failure


@pytest.mark.parametrize("backend", quick_on("prague"))
def test_fork(backend: str) -> None:
    for answers, took, tensor, failure in run_ranks(body_fork, 2, backend):
        for answer in answers[:2]:
            assert answer.startswith(f"DistBackendError: {backend} [rank "), answer
            assert "cannot be used in its forked child" in answer, answer
        assert answers[2:] == ["returned", "destroyed"]
        assert took < 5
        assert tensor == [2.0, 2.0]
        assert failure == (-1, "")


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> float:
        return float(index)


def body_loader(rank: Rank) -> Any:
    rank.init()
    totals = []
    for _ in range(2):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        total = torch.zeros(1, dtype=torch.float64)
        for batch in loader:
            total += batch.sum()
            dist.all_reduce(torch.ones(1))
        totals.append(total.item())
    dist.destroy_process_group()
    return totals


def test_forked_data_loader_workers() -> None:
    assert run_ranks(body_loader, 2) == [[496.0, 496.0]] * 2
