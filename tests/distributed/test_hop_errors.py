"""What "hop" refuses, with which words; what happens when ranks disagree, one of them dies, or their scripts end."""

from __future__ import annotations

import contextlib
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, launch, run_ranks, run_script
from hop_reference import hop
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

DEADLINE = 10.0
DEATH_LIMIT = 5.0


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


# ---- What one rank can see ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"graph": "star"}, r'HopOptions.graph must be one of ring-based, .*full; got "star"'),
        ({"order": "both"}, r'HopOptions.order must be one of parallel, serial; got "both"'),
        ({"max_iteration_gap": -1}, r"HopOptions.max_iteration_gap must be in \[0, \d+\], got -1"),
        ({"backup_workers": -1}, r"HopOptions.backup_workers must be in \[0, \d+\], got -1"),
        ({"staleness": -2}, r"HopOptions.staleness must be in \[0, \d+\], got -2"),
        ({"max_jump": -2}, r"HopOptions.max_jump must be in \[0, \d+\], got -2"),
        ({"jump_trigger": 0}, r"HopOptions.jump_trigger must be in \[1, \d+\], got 0"),
        ({"backup_workers": 1}, r"HopOptions.max_iteration_gap = 0: allowed 1 or more with backup_workers = 1"),
        (
            {"backup_workers": 1, "staleness": 2, "max_iteration_gap": 3},
            r"HopOptions.staleness = 2: allowed 0 with backup_workers = 1",
        ),
        (
            {"max_jump": 4, "max_iteration_gap": 3},
            r"HopOptions.max_jump = 4: allowed 0 without backup_workers or staleness",
        ),
        ({"max_jump": 4, "staleness": 2}, r"HopOptions.max_iteration_gap = 0: allowed 1 or more with max_jump = 4"),
        ({"max_jump": 1, "staleness": 2, "max_iteration_gap": 3}, r"HopOptions.max_jump = 1: allowed 0 .* or 2"),
        ({"notify_ack": True, "max_iteration_gap": 2}, r"HopOptions.max_iteration_gap = 2: allowed 0 with notify_ack"),
        ({"notify_ack": True, "staleness": 2}, r"HopOptions.staleness = 2: allowed 0 with notify_ack"),
        ({"neighbours": []}, r"HopOptions.neighbours must have a list a rank"),
        ({"neighbours": [[1], [0]], "weights": [[1.0]]}, r"neighbours and weights are both given, for 2 and 1 ranks"),
        ({"neighbours": [[1], [2], [1]]}, r"HopOptions.neighbours: .*strongly connected"),
        ({"neighbours": [[1], [2], [3]]}, r"HopOptions.neighbours: .*3"),
        ({"neighbours": [[1], [0, 0]]}, r"HopOptions.neighbours: .*0"),
        ({"weights": [[0.5, 0.5], [0.6, 0.4]]}, r"HopOptions.weights: .*1\.1"),
        ({"weights": [[0.5, 0.5]]}, r"HopOptions.weights: "),
        ({"weights": [[1.0, 0.0], [0.0, 1.0]]}, r"HopOptions.weights: .*strongly connected"),
        ({"weights": [[0.0, 1.0], [1.0, 0.0]]}, r"HopOptions.weights: .*0"),
        ({"weights": [[1.5, -0.5], [-0.5, 1.5]]}, r"HopOptions.weights: .*-0\.5"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchext.HopOptions(**options)


@pytest.mark.parametrize("options", [{"max_ig": 2}, {"staleness": "4"}, {"graph": 3}, {"neighbours": 5}], ids=str)
def test_an_unknown_option_or_type(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="incompatible"):
        torchext.HopOptions(**options)


def test_options_tell_what_they_are() -> None:
    options = torchext.HopOptions(neighbours=[[1], [0]], staleness=2, timeout=timedelta(seconds=7))
    assert options.neighbours == [[1], [0]] and options.weights is None and options.staleness == 2
    text = "HopOptions(graph=neighbours of 2 ranks, order='parallel', notify_ack=False, max_iteration_gap=0"
    assert repr(options).startswith(text), options
    assert torchext.HopOptions().graph == "ring-based"


def body_refused(rank: Rank) -> bool:
    for number, (options, text) in enumerate(
        [
            ({"neighbours": [[1], [0]]}, r"HopOptions.neighbours describes a graph of 2 ranks, the group has 3"),
            ({"weights": [[0.5, 0.5], [0.5, 0.5]]}, r"HopOptions.weights describes a graph of 2 ranks, .* has 3"),
            ({"graph": "double-ring"}, r"HopOptions.graph: .*3"),
            ({"backup_workers": 3, "max_iteration_gap": 2}, r"HopOptions.backup_workers = 3: allowed 0\.\.2"),
        ]
    ):
        with pytest.raises(ValueError, match=text):
            rank.init("hop", store=f"refused {number}", pg_options=torchext.HopOptions(**options))
    rank.init("hop")
    synced = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    synced.module[1] = nn.SyncBatchNorm(4)  # later, as DDP takes none on a CPU
    with pytest.raises(ValueError, match=r"'1' is a SyncBatchNorm.*Use BatchNorm"):
        torchext.attach(synced, sgd(synced))
    assert torchext.backend_of().failure == (-1, "")
    return True


def test_refused_when_the_group_is_made() -> None:
    assert run_ranks(body_refused, 3) == [True] * 3


def body_children(rank: Rank) -> bool:
    """A subgroup has the parent's options as far as they fit it."""
    ring = [[1, 3], [2, 0], [3, 1], [0, 2]]
    rank.init("hop", pg_options=torchext.HopOptions(neighbours=ring, backup_workers=2, max_iteration_gap=3, max_jump=4))
    world = dist.group.WORLD
    if not hasattr(world, "split_group"):
        return True
    child = world.split_group([0, 2])
    if rank.rank in (0, 2):
        options: Any = child._get_backend(torch.device("cpu")).options
        assert options.neighbours is None and options.graph == "ring-based"
        assert (options.backup_workers, options.max_iteration_gap, options.max_jump) == (1, 3, 4)
    return True


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="split_group of torch 2.11's own Gloo hangs at times")
def test_a_child_takes_what_fits() -> None:
    assert run_ranks(body_children, 4) == [True] * 4


# ---- What only a comparison of ranks can see ----


def body_disagreement(rank: Rank) -> list[tuple[str, str, str, float]]:
    rank.init("hop")
    odd = rank.rank == 2
    errors = []

    def attach(word: str, model: nn.Module, **options: Any) -> None:
        group = hop(**options)
        # init_sync: DDP's own comparison of parameters would come first.
        ddp = DistributedDataParallel(model, process_group=group, init_sync=False)
        errors.append((word, *elapsed_error(lambda: torchext.attach(ddp, sgd(ddp)))))
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [4.0, 4.0]

    model = nn.Linear(4, 1)
    attach("the graph of HopOptions", model, graph="ring" if odd else "full")
    path = [[1], [0, 2], [1, 3], [2]]
    attach("the graph of HopOptions", model, neighbours=[[1, 3], [0, 2], [1, 3], [0, 2]] if odd else path)
    attach("HopOptions.order", model, order="serial" if odd else "parallel")
    attach("HopOptions.notify_ack is 0 on rank 0 and 1 on rank 2", model, notify_ack=odd)
    attach("HopOptions.max_iteration_gap is 4 on rank 0 and 2 on rank 2", model, max_iteration_gap=2 if odd else 4)
    attach("HopOptions.staleness is 1 on rank 0 and 3 on rank 2", model, staleness=3 if odd else 1)
    tokens = {"max_iteration_gap": 4}
    attach("HopOptions.backup_workers is 1 on rank 0 and 2 on rank 2", model, backup_workers=2 if odd else 1, **tokens)
    skips = {"staleness": 2, **tokens}
    attach("HopOptions.max_jump is 0 on rank 0 and 5 on rank 2", model, max_jump=5 if odd else 0, **skips)
    attach("HopOptions.jump_trigger is 2 on rank 0 and 3 on rank 2", model, jump_trigger=3 if odd else 2, **skips)
    attach("number of parameter elements is 5 on rank 0 and 6 on rank 2", nn.Linear(5 if odd else 4, 1))
    return errors


def test_ranks_that_disagree() -> None:
    for errors in run_ranks(body_disagreement, 4):
        for word, kind, text, seconds in errors:
            assert kind == "DistBackendError", text
            assert word in text and "rank 2" in text, (word, text)
            assert seconds < DEADLINE


def body_moved(rank: Rank) -> tuple[str, str, float]:
    rank.init("hop")
    model = nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    optimizer = sgd(ddp)
    torchext.attach(ddp, optimizer)
    model.weight.data = model.weight.data.clone()
    ddp(torch.ones(2, 4)).sum().backward()
    return elapsed_error(optimizer.step)


def test_tensors_given_other_memory() -> None:
    for kind, text, seconds in run_ranks(body_moved, 2):
        assert kind == "RuntimeError" and "parameter or buffer 0 " in text and "before it is wrapped" in text, text
        assert seconds < DEADLINE


# ---- Deaths ----


def body_training(rank: Rank, options: dict[str, Any], timeout: float = 60) -> Any:
    rank.init("hop", timeout=timeout, pg_options=torchext.HopOptions(timeout=timedelta(seconds=timeout), **options))
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = torchext.attach(ddp, optimizer)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()

    train(5)
    dist.barrier()
    rank.report("ready")
    error = elapsed_error(lambda: train(1_000_000))
    later = elapsed_error(sync.synchronize)
    start = time.monotonic()
    with contextlib.suppress(dist.DistBackendError):  # its neighbours cannot be heard any more
        sync.detach()
    return error, later, time.monotonic() - start


DEATHS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (0, {"order": "serial"}),
    (3, {"graph": "ring"}),  # its opposite has no line to it
    (1, {"backup_workers": 1, "max_iteration_gap": 4}),
    (1, {"staleness": 3, "max_iteration_gap": 4, "max_jump": 4}),
    (2, {"notify_ack": True}),
    (3, {"weights": [[0.6, 0.4, 0, 0], [0, 0.6, 0.4, 0], [0, 0, 0.6, 0.4], [0.4, 0, 0, 0.6]]}),
]


@pytest.mark.parametrize(("victim", "options"), DEATHS, ids=str)
def test_sigkill_in_training(victim: int, options: dict[str, Any]) -> None:
    with launch(body_training, 4, options) as ranks:
        ranks.expect("ready")
        time.sleep(0.3)
        ranks.kill(victim)
        start = time.monotonic()
        for outcome in ranks.outcomes(deadline=20):
            assert outcome.ok, outcome.trace
            (kind, text, _), later, detach_seconds = outcome.value
            assert kind == "DistBackendError", (kind, text)
            assert f"rank {victim} died" in text and "hop" in text, text
            assert later[0] == "DistBackendError" and f"rank {victim} died" in later[1], later
            assert later[2] < 1 and detach_seconds < 1
        assert time.monotonic() - start < DEATH_LIMIT
    for rank, process in enumerate(ranks.processes):
        assert process.exitcode == (-signal.SIGKILL if rank == victim else 0), (rank, process.exitcode)


@pytest.mark.parametrize(
    "options",
    [{}, {"order": "serial", "graph": "ring"}, {"backup_workers": 1, "max_iteration_gap": 4}],
    ids=str,
)
def test_sigstop_in_training_honours_the_timeout(options: dict[str, Any]) -> None:
    timeout = 3
    with launch(body_training, 4, options, timeout) as ranks:
        ranks.expect("ready")
        time.sleep(0.3)
        ranks.kill(2, signal.SIGSTOP)
        start = time.monotonic()
        texts = []
        for outcome in ranks.outcomes([0, 1, 3], deadline=30):
            assert outcome.ok, outcome.trace
            (kind, text, _), later, _ = outcome.value
            assert kind == "DistBackendError" and "hop" in text, (kind, text)
            assert later[0] == "DistBackendError" and later[2] < 1, later
            texts.append(text)
        # The first to give up says what for. Who hears of it only when the first has closed its connections says that.
        assert any("waited 3000 ms for" in text and "from rank" in text for text in texts), texts
        assert timeout - 1 < time.monotonic() - start < timeout + DEATH_LIMIT
        ranks.kill(2, signal.SIGCONT)


# ---- Scripts that end ----

SCRIPT = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    import torchext

    store, mode, order = sys.argv[1:]
    rank = int(os.environ["RANK"])
    options = torchext.HopOptions(order=order)
    dist.init_process_group("hop", init_method="file://" + store, rank=rank, world_size=3, pg_options=options)
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    sync = torchext.attach(ddp, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    if mode == "detach":
        sync.detach()
    if mode == "destroy":
        dist.destroy_process_group()
    if mode == "averaged":
        with sync.averaged() as module:
            print(float(module.weight.detach().sum()))
    if mode == "dropped":
        del sync, ddp, optimizer
    if mode == "exception" and rank == 1:
        raise ValueError("on purpose")
    if mode == "exception":
        while True:
            optimizer.zero_grad()
            ddp(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    print("end")
"""


@pytest.mark.parametrize("order", ["parallel", "serial"])
@pytest.mark.parametrize("mode", ["nothing", "detach", "destroy", "averaged", "dropped"])
def test_a_script_ends_cleanly(tmp_path: Path, mode: str, order: str) -> None:
    for code, out, err, _ in run_script(tmp_path, SCRIPT, 3, str(tmp_path / "store"), mode, order):
        assert code == 0, (code, err)
        assert out.endswith("end\n"), out
        assert "Traceback" not in err and "terminate called" not in err and "Error" not in err, err


def test_an_exception_in_training_reaches_the_others(tmp_path: Path) -> None:
    results = run_script(tmp_path, SCRIPT, 3, str(tmp_path / "store"), "exception", "parallel")
    for rank, (code, _, err, _) in enumerate(results):
        assert code == 1, (code, err)
        assert "terminate called" not in err
        assert ("ValueError: on purpose" if rank == 1 else "rank 1") in err, err
        assert rank == 1 or "DistBackendError" in err, err
