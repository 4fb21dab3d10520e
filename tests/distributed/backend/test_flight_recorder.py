"""torch's flight recorder shows what is ours beside the collectives: those need no peer (tests/python/backends)."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import OPTIONS, batch, mlp
from harness import Rank, elapsed_error, run_ranks
from rows import row_values, run_rows
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = [
    pytest.mark.sanitize,
    pytest.mark.skipif(
        not hasattr(c10d, "FlightRecorderHook"),
        reason="this torch records only the backends that record themselves, its own",
    ),
]


def entries(backend: str, operation: str = "") -> list[dict[str, Any]]:
    """Of this process; those of an operation of ours, in the order in which they began."""
    found = json.loads(c10d._dump_fr_trace_json(backend=backend)).get("entries", [])
    return [e for e in found if e["profiling_name"].startswith(f"{backend}:{operation}")]


# ---- Operations of our own ----


def analyse(dumps: list[bytes]) -> Any:
    """What `python -m torch.distributed.flight_recorder.fr_trace` makes of one dump a rank."""
    from torch.distributed.flight_recorder.components.builder import build_db

    details = {f"rank{rank}": {"rank": rank, **pickle.loads(dump)} for rank, dump in enumerate(dumps)}
    arguments = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    return build_db(details, arguments, details["rank0"]["version"])


def body_partial(rank: Rank) -> Any:
    rank.init("prague")
    upper = dist.new_group([2, 3], backend="prague")
    world = torchext.backend_of()
    dist.all_reduce(torch.ones(1))
    for count in (10, 20):
        if rank.rank in (0, 2):
            world.partial_all_reduce(torch.ones(count), [2, 0]).wait()
    world.partial_all_reduce(torch.ones(2, 3), [rank.rank, rank.rank ^ 1]).wait()
    if rank.rank >= 2:
        torchext.backend_of(upper).partial_all_reduce(torch.ones(5), [0, 1]).wait()
    dist.all_reduce(torch.ones(1))
    return entries("prague", "partial_all_reduce"), c10d._dump_fr_trace(backend="prague")


def test_partial_all_reduce() -> None:
    values = run_ranks(body_partial, 4)
    for rank, (recorded, _) in enumerate(values):
        pair = "0,1" if rank < 2 else "2,3"
        expected = [("0/partial_all_reduce " + pair, pair, [[2, 3]], 1)]
        if rank in (0, 2):
            both = "0/partial_all_reduce 0,2"
            expected = [(both, "0,2", [[10]], 1), (both, "0,2", [[20]], 2), *expected]
        found = []
        for entry in recorded[: len(expected)]:
            assert entry["process_group"][1] == "default_pg"
            assert entry["state"] == "completed" and entry["retired"] and entry["duration_ms"] >= 0, entry
            assert entry["output_sizes"] == entry["input_sizes"] and entry["timeout_ms"] == 30_000
            found.append((entry["process_group"][0], entry["input_sizes"], entry["collective_seq_id"]))
            assert entry["profiling_name"] == "prague:" + "partial_all_reduce:all_reduce " + expected[len(found) - 1][1]
        assert found == [(group, sizes, number) for group, _, sizes, number in expected]
        # A subgroup counts by itself, and its members are named by their ranks in it.
        rest = recorded[len(expected) :]
        assert [(e["collective_seq_id"], e["profiling_name"][-3:]) for e in rest] == ([(1, "0,1")] if rank >= 2 else [])
    database = analyse([dump for _, dump in values])
    assert all(call.pass_check for call in database.collectives), database.collectives
    ours = [c for c in database.collectives if "partial_all_reduce" in c.collective_name]
    assert sorted(sorted(c.expected_ranks) for c in ours) == [[0, 1], [0, 2], [0, 2], [2, 3], [2, 3]]
    assert len(database.collectives) == 7


def train(rank: Rank, backend: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The synchronizer, and a function that trains that many steps."""
    rank.init(backend, pg_options=OPTIONS[backend](**options))
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = torchext.attach(ddp, optimizer)

    def steps(count: int) -> None:
        for step in range(count):
            inputs, targets = batch(rank.rank, step)
            optimizer.zero_grad()
            (ddp(inputs) - targets).square().mean().backward()
            optimizer.step()

    return sync, steps


def dump_since(backend: str, last: int) -> bytes:
    """What is recorded behind that entry, as torch dumps it."""
    dump = pickle.loads(c10d._dump_fr_trace(backend=backend))
    dump["entries"] = [entry for entry in dump["entries"] if entry["record_id"] > last]
    return pickle.dumps(dump)


def body_training(rank: Rank, backend: str, options: dict[str, Any]) -> Any:
    last = max((entry["record_id"] for entry in pickle.loads(dump_since(backend, -1))["entries"]), default=-1)
    sync, steps = train(rank, backend, options)
    steps(3)
    sync.synchronize()
    steps(1)
    sync.detach()
    dist.barrier()
    return dump_since(backend, last)


# What each system records, how often in four steps, and how many elements of the model it exchanges.
OPERATIONS: list[tuple[str, dict[str, Any], dict[str, tuple[str, int]]]] = [
    ("prague", {"order": "atc"}, {"average": ("all_reduce", 4)}),
    ("prague", {"generator": "static"}, {"average": ("all_reduce", 4)}),
    ("prague", {"generator": "static", "sync_period": 3}, {"average": ("all_reduce", 1)}),
    ("dssync", {}, {"average": ("all_reduce", 4)}),
    # Parallel: of each session also the model that it begins with.
    ("hop", {}, {"exchange": ("all_reduce", 6)}),
    ("hop", {"order": "serial"}, {"exchange": ("all_reduce", 4)}),
    *(
        (
            "dear",
            {"allreduce_fallback": False, "bucket_mb": 0.001, **form},
            {
                "reduce": ("reduce_scatter_tensor_coalesced", 4),
                "gather": ("all_gather_into_tensor_coalesced", 4),
            },
        )
        for form in ({}, {"form": "replicated"})
    ),
]


def check_training(dumps: list[bytes], backend: str, operations: dict[str, tuple[str, int]]) -> None:
    size = sum(p.numel() for p in mlp().parameters())
    for dump in map(pickle.loads, dumps):
        for operation, (like, count) in operations.items():
            group = f"0/{operation}"
            recorded = [e for e in dump["entries"] if e["process_group"][0] == group]
            assert [e["collective_seq_id"] for e in recorded] == list(range(1, count + 1))
            assert dump["pg_config"][group]["ranks"] == "[0, 1]"
            for entry in recorded:
                assert entry["profiling_name"] == f"{backend}:{operation}:{like}"
                assert entry["process_group"] == (group, "default_pg")
                assert entry["state"] == "completed" and entry["duration_ms"] >= 0, entry
                assert sum(n for (n,) in entry["output_sizes" if operation == "gather" else "input_sizes"]) >= size
                # By the thread that steps, which alone has a Python stack.
                assert "steps" in [frame["name"] for frame in entry["frames"]]
    database = analyse(dumps)
    names = [call.collective_name for call in database.collectives]
    assert all(call.pass_check for call in database.collectives), database.collectives
    for operation, (like, count) in operations.items():
        assert names.count(f"{backend}:{operation}:{like}") == count
    assert f"{backend}:barrier" in names


def test_training() -> None:
    rows = {f"{backend} {options}": (backend, options) for backend, options, _ in OPERATIONS}
    found = row_values(body_training, 2, rows)
    for (name, dumps), (backend, _, operations) in zip(found.items(), OPERATIONS, strict=True):
        try:
            check_training(dumps, backend, operations)
        except AssertionError as error:
            error.add_note(name)
            raise


def body_off(rank: Rank, backend: str, options: dict[str, Any]) -> Any:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    sync, steps = train(rank, backend, options)
    steps(2)
    sync.detach()
    return entries(backend)


def test_off_records_nothing() -> None:
    assert run_ranks(body_off, 2, "prague", {}) == [[], []]


# ---- What does not end ----


def body_stopped(rank: Rank, backend: str, _: dict[str, Any], operation: str) -> Any:
    rank.init(backend, pg_options=OPTIONS[backend](heartbeat_timeout=timedelta(seconds=1)))
    average = torchext.backend_of().partial_all_reduce
    average(torch.ones(3), [0, 1]).wait()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    error = elapsed_error(lambda: average(torch.ones(3), [0, 1]).wait())
    return error, entries(backend, operation)


def body_left_alone(rank: Rank, backend: str, options: dict[str, Any], operation: str) -> Any:
    sync, steps = train(rank, backend, options)
    steps(2)
    sync.synchronize()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = elapsed_error(lambda: steps(1000))
    return error, [e for e in entries(backend) if e["process_group"][0] == f"0/{operation}"]


def body_of(rank: Rank, body: Callable[..., Any], *arguments: Any) -> Any:
    return body(rank, *arguments)


def test_what_a_lost_peer_was_needed_for_stays_open() -> None:
    rows: dict[str, tuple[Any, ...]] = {
        "stopped, prague": (body_stopped, "prague", {}, "partial_all_reduce"),
        "killed, prague": (body_left_alone, "prague", {"generator": "static"}, "average"),
        "killed, dssync": (body_left_alone, "dssync", {"order": "atc"}, "average"),
        "killed, hop": (body_left_alone, "hop", {}, "exchange"),
        "killed, dear": (body_left_alone, "dear", {"allreduce_fallback": False}, "reduce"),
    }
    for name, outcomes in run_rows(body_of, 2, rows, victims={1}).items():
        assert outcomes[0].ok, (name, outcomes[0].trace)
        (kind, text, _), recorded = outcomes[0].value
        says = "rank 1 died" if name.startswith("killed") else "rank 1 has been silent"
        assert kind == "DistBackendError" and says in text, (name, text)
        *before, last = [(entry["state"], entry["retired"]) for entry in recorded]
        assert before and set(before) == {("completed", True)} and last == ("scheduled", False), (name, before, last)
