"""calibrate() measures the same tables on every rank, of any backend, within its time; a lost rank ends it."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, launch, run_ranks
from interpreters import environments, run_interpreters
from pretended_hosts import be_on_host, needs_root
from rows import row, values_in_turn

import torchext
from torchext import _C, auto


def body_calibrate(rank: Rank, backend: str, max_seconds: float) -> Any:
    rank.init(backend)
    begin = time.monotonic()
    link = auto.calibrate(max_seconds=max_seconds)
    elapsed = time.monotonic() - begin
    dist.destroy_process_group()
    return asdict(link), elapsed


def check_tables(results: list[Any], backend: str) -> None:
    link, _ = results[0]
    assert all(other == link for other, _ in results)
    assert (link["backend"], link["device"], link["host_of"]) == (backend, "cpu", (0,) * len(results))
    assert set(link["tables"]) == {"all_reduce", "reduce_scatter", "all_gather", "p2p", "rows"}
    for name, table in link["tables"].items():
        sizes = [nbytes for nbytes, _ in table["points"]]
        assert len(sizes) >= 2, name
        assert sizes == sorted(set(sizes)), name
        assert 0 < sizes[0] <= 4096, name
        assert all(0 < seconds < 5 for _, seconds in table["points"]), name
        assert table["measured"]
    assert link["bytes_per_second"] > 1e6
    assert link["copy_bytes_per_second"] > 1e6
    assert link["operations_per_second"] > 1e6


def body_again(rank: Rank) -> Any:
    """Nothing is left behind: the group goes on, and a second calibration finds it as the first did."""
    rank.init("dear")
    backend = torchext.backend_of()
    links = [asdict(auto.calibrate(max_seconds=0.05)) for _ in range(2)]
    values: list[Any] = [None] * rank.size
    dist.all_gather_object(values, rank.rank)
    assert backend.failure == (-1, "")
    dist.destroy_process_group()
    return links, values


def test_all_ranks_have_the_same_tables() -> None:
    cases: dict[str, Any] = {backend: (body_calibrate, backend, 0.5) for backend in ("gloo", "dear")}
    cases |= {"short of time": (body_calibrate, "gloo", 0.001), "again": (body_again,)}
    found = values_in_turn(cases, 3)
    for backend in ("gloo", "dear"):
        with row(backend):
            check_tables(found[backend], backend)
    for link, elapsed in found["short of time"]:  # then the largest sizes are dropped
        assert [len(table["points"]) for table in link["tables"].values()] == [2] * 5
        assert elapsed < 5
    for at in range(2):
        with row("again", at):
            check_tables([(links[at], None) for links, _ in found["again"]], "dear")
    assert [values for _, values in found["again"]] == [[0, 1, 2]] * 3


HALVES = {"reduce_scatter_hierarchical", "all_gather_hierarchical"}


def body_rooms(rank: Rank, backend: str) -> Any:
    be_on_host(rank.rank % 2)
    return body_calibrate(rank, backend, 0.5)


@needs_root
def test_hosts_of_several_ranks_are_rooms() -> None:
    for backend, results in values_in_turn({backend: (body_rooms, backend) for backend in ("gloo", "dear")}, 4).items():
        link, _ = results[0]
        assert all(other == link for other, _ in results), backend
        assert link["host_of"] == (0, 1, 0, 1), backend
        assert set(link["tables"]) > HALVES, backend


def body_different(rank: Rank) -> Any:
    rank.init("gloo")
    errors = []
    for seconds in (1.0 + rank.rank, -1.0 if rank.rank == 1 else 1.0):
        with pytest.raises(ValueError, match="max_seconds") as error:
            auto.calibrate(max_seconds=seconds)
        errors.append(str(error.value))
    dist.destroy_process_group()
    return errors


def test_errors_are_raised_on_all_ranks() -> None:
    first, second = run_ranks(body_different, 2)
    assert first[0] == second[0]
    assert "max_seconds is 1.0 on rank 0 and 2.0 on rank 1" in first[0]
    assert "rank 1 raised ValueError: max_seconds must be finite and from 0 to 600, got -1.0" in first[1]
    assert "max_seconds must be finite" in second[1]


def body_killed(rank: Rank, backend: str) -> Any:
    rank.init(backend)
    rank.report("ready")
    while True:
        auto.calibrate(max_seconds=1.0)


# tests/cpp/c10d has a lost rank of every backend; here is its name.
@pytest.mark.parametrize(
    ("backend", "error"),
    [pytest.param("gloo", "RuntimeError", marks=pytest.mark.slow), ("dear", "DistBackendError")],
)
def test_a_lost_rank_ends_it(backend: str, error: str) -> None:
    with launch(body_killed, 2, backend) as ranks:
        ranks.expect("ready")
        time.sleep(0.5)
        ranks.kill(1)
        (outcome,) = ranks.outcomes(deadline=20)
        assert outcome.error in (error, "DistBackendError"), outcome.trace
        if backend == "dear":
            assert "rank 1" in outcome.message


def body_interrupted(rank: Rank) -> Any:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, stop)  # SIGINT is ignored where the tests run in the background
    rank.init("gloo")
    rank.report("ready")
    if rank.rank == 1:
        time.sleep(5)  # the other one waits
        return 0.0
    begin = time.monotonic()
    try:
        # Under calibrate(), whose agreement on arguments is a wait of Gloo's own.
        _C.calibrate_links(dist.distributed_c10d._get_default_group(), None, torch.device("cpu"), 1.0)
    except KeyboardInterrupt:
        return time.monotonic() - begin
    return -1.0


def test_an_interrupt_ends_the_wait() -> None:
    with launch(body_interrupted, 2) as ranks:
        ranks.expect("ready")
        time.sleep(1)
        ranks.kill(0, signal.SIGUSR1)
        waited, _ = ranks.values()
        assert 0 < waited < 4.5


def test_bench_prints_and_saves(tmp_path: Path) -> None:
    words = ["-m", "torchext.auto", "bench", "--max-seconds", "0.2"]
    words += ["--json", str(tmp_path / "link.json"), "--plot", str(tmp_path / "link.png")]
    ended = run_interpreters(tmp_path, [*words], environments(2))
    assert [each.code for each in ended] == [0, 0], ended
    outputs = [each.out for each in ended]
    assert outputs[0].startswith("2 ranks on 1 host, backend gloo, cpu: a link has ")
    assert not outputs[1]
    link = auto.LinkModel.load(tmp_path / "link.json")
    assert link.world_size == 2
    assert json.loads((tmp_path / "link.json").read_text())["version"] == 1
    assert (tmp_path / "link.png").stat().st_size > 1000
