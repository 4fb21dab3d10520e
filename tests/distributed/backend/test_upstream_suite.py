"""PyTorch's own distributed tests, under "gloo" and under our names: whatever passes for gloo must pass for them.

The tests are those of `torch.testing._internal.distributed.distributed_test`. Its decorators read the backend's name
when the module is imported, and allow or skip by it. So the module is imported as for gloo, and every group that a test
then creates as "gloo" is created as "prague", say, instead: one substitution, in `_new_process_group_helper`.

Upstream starts fresh processes for each test. Here three ranks run one test after the other, each with a process group
of its own; after a failure or a hang they are replaced.

Selection: every test that gloo passes on CPUs with three ranks, about 90 of collectives and the 6 of DDP that run
on CPUs; upstream's decorators skip the rest, which need GPUs. Gloo runs those that do not pass under our name. Three
ranks, because many tests use the subgroup [1, 2] and rings of odd length. It takes a minute on two cores.
UPSTREAM_SUITE_REPORT names a file to follow it by.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from case_choice import quick_on
from harness import Rank, launch

WORLD_SIZE = 3
# Seconds for one test. Far above what any takes, far below a job's limit.
LIMIT = 60.0

# gloo passes, ours need not. Each with its reason.
EXCEPTIONS: dict[str, str] = {
    "test_get_backend": "asserts that the group's backend has the name asked for, which the substitution changes",
    "test_ddp_logging_data_cpu": "DDP's logger knows built-in backends only and calls every other one 'custom'",
} | (
    {
        f"test_monitored_barrier_{name}": "torch 2.11's dist.monitored_barrier refuses groups that are not called gloo"
        for name in ("gloo", "gloo_subgroup")
    }
    if torch.__version__.startswith("2.11")
    else {}
)

# Not run, for neither backend: gloo fails them here, and a failure costs new processes.
NOT_RUN: dict[str, str] = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_barrier_timeout_global": "initializes by env:// on a port of its own",
    "test_batch_isend_irecv_mixed_backend_err": "needs a GPU",
    "test_batch_isend_irecv_op_err": "needs a GPU",
    "test_new_subgroups_with_group_param": "needs four ranks",
} | {
    f"test_all_to_all{suffix}": "lists of unequal shapes, which gloo does not take"
    for suffix in ("", "_complex", "_cuda", "_cuda_complex", "_full_group", "_full_group_cuda")
}


def prepare(folder: Path) -> Any:
    """Imports upstream's module in a rank."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=str(folder), MASTER_ADDR="127.0.0.1")
    for name in ("barrier", "test_dir"):
        (folder / name).mkdir(exist_ok=True)
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def substitute(backend: str) -> None:
    """From now on groups that are asked for as gloo are made by `backend`."""
    import torch.distributed.distributed_c10d as c10d

    import torchext

    torchext.register()
    original = c10d._new_process_group_helper

    def helper(size: Any, rank: Any, ranks: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        name = backend if str(name) == "gloo" else name
        return original(size, rank, ranks, name, *args, **kwargs)

    c10d._new_process_group_helper = helper


def names_body(rank: Rank) -> list[str]:
    base = prepare(rank.folder).DistributedTest._DistTestBase
    return sorted(name for name in dir(base) if name.startswith("test_"))


def suite_body(rank: Rank, backend: str, names: list[str]) -> None:
    import unittest

    upstream = prepare(rank.folder)
    from torch.testing._internal.common_distributed import TEST_SKIPS

    if backend != "gloo":
        substitute(backend)
    skips = {skip.exit_code for skip in TEST_SKIPS.values()}

    class Suite(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        pass

    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    sys.stdout.flush()
    for index, name in enumerate(names):
        start = time.monotonic()
        case = Suite(name)
        case.rank = rank.rank
        case.file_name = str(rank.folder / f"file{index}")
        rank.init("gloo", store=f"store{index}", timeout=float(upstream.CUSTOM_PG_TIMEOUT.get(name, 30)))
        case._barrier(timeout=30)
        status, detail = "ok", ""
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            status, detail = "skipped", str(skip)
        except SystemExit as stop:
            if stop.code in skips:
                status = "skipped"
            elif stop.code not in (0, None):
                status, detail = "failed", f"exit code {stop.code}"
        except BaseException as error:  # compared with the other backend
            status, detail = "failed", f"{type(error).__name__}: {error}"
        if status != "failed":
            try:
                case._barrier(timeout=30)
                import torch.distributed as dist

                if dist.is_initialized():
                    dist.destroy_process_group()
            except BaseException as error:
                status, detail = "failed", f"afterwards: {type(error).__name__}: {error}"
        rank.report(f"{index}\t{status}\t{time.monotonic() - start:.2f}\t{detail[:600]}")
        if status == "failed":
            return


def note(line: str) -> None:
    """Appends to the file of UPSTREAM_SUITE_REPORT, for following a long run."""
    with Path(os.environ.get("UPSTREAM_SUITE_REPORT", os.devnull)).open("a") as out:
        print(line, file=out)


def run_suite(backend: str, names: list[str]) -> dict[str, tuple[str, float, str]]:
    """name -> (ok, skipped, failed or hung; seconds; detail of the first rank that failed)."""
    results: dict[str, tuple[str, float, str]] = {}
    todo = list(names)
    while todo:
        with launch(suite_body, WORLD_SIZE, backend, todo) as ranks:
            for index, name in enumerate(todo):

                def reported(words: list[list[str]], outcomes: Any, index: int = index) -> bool:
                    lines = [line for rank in words for line in rank if line.startswith(f"{index}\t")]
                    return (
                        len(lines) == WORLD_SIZE
                        or any("\tfailed\t" in line for line in lines)
                        or any(outcome.error for outcome in outcomes.values())
                    )

                in_time = ranks.wait_until(reported, LIMIT + (30 if index == 0 else 0))
                lines = [line.split("\t") for rank in ranks._seen for line in rank if line.startswith(f"{index}\t")]
                failed = [line for line in lines if line[1] == "failed"]
                note(f"{backend}\t{name}\t" + " ".join(f"{line[1]} {line[2]} {line[3][:200]}" for line in lines))
                if failed:
                    results[name] = ("failed", float(failed[0][2]), failed[0][3])
                elif len(lines) < WORLD_SIZE:
                    trace = "".join(outcome.trace[-600:] for outcome in ranks._outcomes.values())
                    results[name] = ("ended" if in_time else "hung", LIMIT, trace)
                else:
                    status = "skipped" if any(line[1] == "skipped" for line in lines) else "ok"
                    results[name] = (status, max(float(line[2]) for line in lines), lines[0][3])
                    continue
                break
            todo = todo[index + 1 :]
    return results


def is_ddp(name: str) -> bool:
    return "ddp" in name.lower() or "DistributedDataParallel" in name


@functools.cache
def names_of(part: str) -> list[str]:
    with launch(names_body, 1) as ranks:
        names = ranks.values(120)[0]
    return [name for name in names if is_ddp(name) == (part == "ddp") and name not in NOT_RUN]


@pytest.mark.timeout(1800)
# All backends forward these calls by one class.
@pytest.mark.long
@pytest.mark.parametrize("part", ["collectives", "ddp"])
@pytest.mark.parametrize("backend", quick_on("prague"))
def test_what_passes_for_gloo_passes_for_ours(backend: str, part: str) -> None:
    pytest.importorskip("expecttest")
    pytest.importorskip("numpy")
    results = run_suite(backend, names_of(part))
    passing = [name for name, (status, *_) in results.items() if status == "ok"]
    # What passes for ours needs no run under gloo.
    others = run_suite("gloo", [name for name in results if name not in passing])
    gloo_alone = [name for name, (status, *_) in others.items() if status == "ok" and name not in EXCEPTIONS]
    assert not gloo_alone, "\n".join(f"{name}: {results[name]}" for name in gloo_alone)
    needless = [name for name in EXCEPTIONS if name in passing]
    assert not needless, f"these pass and need no exception: {needless}"
    assert len(passing) >= (5 if part == "ddp" else 60)  # an empty selection would prove nothing
