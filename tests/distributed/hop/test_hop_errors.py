"""What "hop" refuses, with which words; what happens when ranks disagree."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, elapsed_error, run_ranks
from hop_reference import hop
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize

DEADLINE = 10.0


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
        (
            {"jump_trigger": 2, "staleness": 2},
            r"HopOptions.jump_trigger = 2: allowed 1 \(the default\) without max_jump",
        ),
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
        ({"neighbours": []}, r"HopOptions.neighbours must have an entry for each rank, got"),
        ({"neighbours": [[1], [0]], "weights": [[1.0]]}, r"neighbours and weights are both given, for 2 and 1 ranks"),
        (
            {"neighbours": [[1], [0]], "graph": "full"},
            r'HopOptions.graph = "full": allowed without neighbours, which .*; leave one of them out',
        ),
        ({"weights": [[0.5, 0.5], [0.5, 0.5]], "graph": "ring"}, r'HopOptions.graph = "ring": allowed without weights'),
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_ig": 2}, "^HopOptions: no option max_ig: allowed graph, neighbours, "),
        ({"staleness": "4"}, r"^HopOptions: staleness must be an int, got '4' \(str\)$"),
        ({"graph": 3}, r"^HopOptions: graph must be a str, got 3 \(int\)$"),
        ({"neighbours": 5}, r"^HopOptions: neighbours must be a list of ranks for each rank, or None, got 5 \(int\)$"),
    ],
    ids=str,
)
def test_an_unknown_option_or_type(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        torchext.HopOptions(**options)


def test_options_tell_what_they_are() -> None:
    options = torchext.HopOptions(neighbours=[[1], [0]], staleness=2, timeout=timedelta(seconds=7))
    assert options.neighbours == [[1], [0]] and options.weights is None and options.staleness == 2
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
    plain = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"bucket_mb must be 'auto' with hop, which sends whole models, got 2"):
        torchext.attach(plain, sgd(plain), bucket_mb=2)
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
        child.barrier().wait()  # who leaves earlier would close connections that the other still makes
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
    attach("HopOptions.graph's in-neighbours[0] is 0, 1, 2, 3 (weights", model, graph="ring" if odd else "full")
    path = [[1], [0, 2], [1, 3], [2]]
    attach(
        "HopOptions.graph's in-neighbours[0] is 0, 1 (weights",
        model,
        neighbours=[[1, 3], [0, 2], [1, 3], [0, 2]] if odd else path,
    )
    attach("HopOptions.order is parallel on rank 0 and serial on rank 2", model, order="serial" if odd else "parallel")
    attach("HopOptions.notify_ack is False on rank 0 and True on rank 2", model, notify_ack=odd)
    attach("HopOptions.max_iteration_gap is 4 on rank 0 and 2 on rank 2", model, max_iteration_gap=2 if odd else 4)
    attach("HopOptions.staleness is 1 on rank 0 and 3 on rank 2", model, staleness=3 if odd else 1)
    tokens = {"max_iteration_gap": 4}
    attach("HopOptions.backup_workers is 1 on rank 0 and 2 on rank 2", model, backup_workers=2 if odd else 1, **tokens)
    skips = {"staleness": 2, **tokens}
    attach("HopOptions.max_jump is 0 on rank 0 and 5 on rank 2", model, max_jump=5 if odd else 0, **skips)
    attach(
        "HopOptions.jump_trigger is 2 on rank 0 and 3 on rank 2",
        model,
        jump_trigger=3 if odd else 2,
        max_jump=4,
        **skips,
    )
    attach("parameters[0] is Float[1, 4] on rank 0 and Float[1, 5] on rank 2", nn.Linear(5 if odd else 4, 1))
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
    ddp(torch.ones(2, 4)).sum().backward()
    model.weight.grad = None
    model.weight.data = model.weight.data.double()
    return elapsed_error(optimizer.step)


def test_tensors_given_other_memory() -> None:
    for kind, text, seconds in run_ranks(body_moved, 2):
        assert kind == "RuntimeError" and "parameter or buffer 0 " in text and "before it is wrapped" in text, text
        assert seconds < DEADLINE
