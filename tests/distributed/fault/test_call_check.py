"""Ranks that call different collectives: an error on every rank that names both calls, and never a wrong number."""

from __future__ import annotations

import builtins
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS
from harness import Rank, elapsed_error, run_ranks
from rows import meet, row_values
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.backends import BACKENDS

pytestmark = pytest.mark.sanitize

LIMIT = 5.0  # usually a few milliseconds

Reduce = dist.ReduceOp

# name -> (what rank ODD calls, what the others call, both as the error says them)
ODD = 1
DIFFERENT: dict[str, tuple[Any, Any, str, str]] = {
    "numel": (
        lambda: dist.all_reduce(torch.ones(12)),
        lambda: dist.all_reduce(torch.ones(10)),
        "all_reduce(sum, float32, 12 elements)",
        "all_reduce(sum, float32, 10 elements)",
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(3), src=1),
        lambda: dist.broadcast(torch.ones(3), src=0),
        "broadcast(float32, 3 elements, root 1)",
        "broadcast(float32, 3 elements, root 0)",
    ),
}


def body_different(rank: Rank, name: str, before: int) -> Any:
    rank.init(timeout=60)
    odd, others, _, _ = DIFFERENT[name]
    for _ in range(before):  # so that the others' call is one that was predicted
        others()
    meet(rank, "agreed")  # a root is done with its broadcasts before all others are

    def call() -> None:
        (odd if rank.rank == ODD else others)()
        # Of a broadcast whose root agrees with it a rank may have the right result, before it hears of the difference.
        assert rank.rank != ODD and name == "root"
        dist.barrier()

    error = elapsed_error(call)
    untouched = torch.full((4,), 7.0)
    later = elapsed_error(lambda: dist.all_reduce(untouched))
    return error, later, untouched.tolist(), torchext.backend_of().failure


def check_different(values: list[Any], name: str) -> None:
    _, _, odd, others = DIFFERENT[name]
    for error, later, untouched, failure in values:
        assert error[0] == later[0] == "DistBackendError", (error, later)
        named = re.search(r"ranks (\d) and (\d) make different calls #(\d+): ", error[1])
        assert named and str(ODD) in named.groups()[:2], error[1]
        assert odd in error[1] and others in error[1], error[1]
        assert error[2] < LIMIT and later[2] < LIMIT
        assert untouched == [7.0] * 4
        assert failure[1] in error[1]


# Every other difference, and every backend: tests/cpp/c10d/fault/call_check_test.cc and backend/every_backend_test.cc.
def test_a_difference_is_an_error_on_every_rank() -> None:
    rows = {f"{name} after {before}": (name, before) for name in DIFFERENT for before in (0, 4)}
    for row, values in row_values(body_different, 8, rows).items():
        check_different(values, rows[row][0])


def body_lines(rank: Rank) -> Any:
    rank.init(timeout=60, pg_options=torchext.PragueOptions(call_check="lines", timeout=timedelta(seconds=60)))
    a, b = torch.full((10,), 1.0), torch.full((10,), 7.0)

    def in_order() -> None:
        dist.all_reduce(a)
        dist.all_reduce(b)

    def exchanged() -> None:
        dist.all_reduce(b)
        dist.all_reduce(a)

    in_order()
    before = a.tolist(), b.tolist()
    first = in_order.__code__.co_firstlineno
    error = elapsed_error(exchanged if rank.rank == ODD else in_order)
    return error, (a.tolist(), b.tolist()) == before, (first + 1, first + 5)


def test_equal_calls_in_another_order() -> None:
    for error, untouched, (usual, odd) in run_ranks(body_lines, 4):
        assert error[0] == "DistBackendError" and error[2] < LIMIT, error
        assert "make different calls #3" in error[1], error
        for line in (usual, odd):
            assert f"all_reduce(sum, float32, 10 elements) at test_call_check.py:{line}" in error[1], error
        assert untouched


def body_lines_of_a_script(rank: Rank, backend: str) -> Any:
    rank.init(backend, pg_options=OPTIONS[backend](call_check="lines"))
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = torchext.attach(model, optimizer)
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with sync.averaged():
        dist.barrier()
    everyone: list[Any] = [None] * rank.size
    dist.all_gather_object(everyone, rank.rank)
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    thread.join()
    apart = dist.new_group(backend=backend, pg_options=OPTIONS[backend](call_check="lines"))
    if rank.rank == 0:
        kind, text, _ = elapsed_error(lambda: dist.barrier(apart))
    else:
        kind, text, _ = elapsed_error(lambda: dist.barrier(apart))
    assert kind == "DistBackendError" and text.count("barrier() at test_call_check.py:") == 2, (kind, text)
    dist.destroy_process_group(apart)
    # The ways to leave have lines of their own.
    if rank.rank == 0:
        dist.destroy_process_group()
    else:
        dist.destroy_process_group()
    return everyone


def test_scripts_whose_lines_are_compared() -> None:
    found = row_values(body_lines_of_a_script, 2, {backend: (backend,) for backend in sorted(BACKENDS)})
    assert found == {backend: [[0, 1]] * 2 for backend in BACKENDS}


def body_first_lines(rank: Rank) -> list[float]:
    """The first calls of two threads, while whoever imports something lets the other have the interpreter."""
    rank.init(pg_options=torchext.PragueOptions(call_check="lines"))
    groups = [dist.group.WORLD, dist.new_group(backend="prague", pg_options=torchext.PragueOptions(call_check="lines"))]
    tensors = [torch.ones(1) for _ in groups]
    threads = [
        threading.Thread(target=dist.all_reduce, args=(tensor,), kwargs={"group": group})
        for tensor, group in zip(tensors, groups, strict=True)
    ]
    imported = builtins.__import__

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return imported(*args, **kwargs)

    builtins.__import__ = slow
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        builtins.__import__ = imported
    return [tensor.item() for tensor in tensors]


def test_first_calls_of_two_threads_whose_lines_are_compared() -> None:
    assert run_ranks(body_first_lines, 2, deadline=20) == [[2.0, 2.0]] * 2


# ---- What must go on working ----


def body_order(rank: Rank) -> Any:
    """Calls of new shapes, launched before their elders have started, beside messages that the peers wait for."""
    rank.init(timeout=30)
    n, me = rank.size, rank.rank
    if me == 0:
        first = dist.all_reduce(torch.ones(3), async_op=True)
        dist.send(torch.ones(1), dst=1)
        first.wait()
    else:
        if me == 1:
            dist.recv(torch.ones(1), src=0)
        dist.all_reduce(torch.ones(3))
    works = []
    for i in range(60):
        tensor = torch.full((1 + i % 7,), float(me + i), dtype=(torch.float32, torch.float64)[i % 2])
        works.append((i, tensor, dist.all_reduce(tensor, async_op=True)))
    for i, tensor, work in reversed(works):
        value = work.get_future().wait()[0] if i % 3 == 0 else None
        work.wait()
        assert work.is_completed() and work.is_success()
        assert tensor.tolist() == [float(sum(range(n)) + n * i)] * tensor.numel()
        assert value is None or value is tensor or torch.equal(value, tensor)
    dist.group.WORLD.monitored_barrier()  # torch 2.11: the function in dist refuses all but gloo
    uneven = torch.zeros(sum(range(1, n + 1)))
    dist.all_to_all_single(uneven, torch.full((n * (me + 1),), float(me)), list(range(1, n + 1)), [me + 1] * n)
    assert uneven.tolist() == [float(r) for r in range(n) for _ in range(r + 1)]
    mask = torch.ones(1) if me == 0 else torch.ones(1, 1)  # equal but for a dimension of one
    dist.all_reduce(mask)
    halves = dist.new_group([0, 1])
    if me < 2:
        dist.all_reduce(torch.ones(5), group=halves)
    dist.barrier()
    sequence = torchext.backend_of()._get_sequence_number_for_group()
    dist.destroy_process_group()
    return sequence


def body_invalid(rank: Rank) -> Any:
    rank.init()
    errors = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2), op=Reduce.BAND),
        lambda: dist.all_reduce(torch.ones(2), op=Reduce.BAND, async_op=True).wait(),
    ):
        errors.append(elapsed_error(call))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return errors, tensor.tolist()


def body_of(rank: Rank, body: Callable[[Rank], Any]) -> Any:
    return body(rank)


def test_calls_start_in_their_order_and_an_invalid_one_fails_by_itself() -> None:
    found = row_values(body_of, 8, {"order": (body_order,), "invalid": (body_invalid,)})
    assert len(set(found["order"])) == 1
    for errors, tensor in found["invalid"]:
        assert all(kind in ("RuntimeError", "ValueError") for kind, _, _ in errors), errors
        assert tensor == [8.0, 8.0]
