"""What "hop" refuses of groups, and when ranks disagree; what one rank sees is in tests/python/hop."""

from __future__ import annotations

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


def body_refused(rank: Rank) -> None:
    """By what options say of a group's size, which is looked at when the ranks have met."""
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
    assert torchext.backend_of().failure == (-1, "")


def test_refused_when_the_group_is_made() -> None:
    run_ranks(body_refused, 3)


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
    """Seen when they are sent, which one rank alone does not do."""
    for kind, text, seconds in run_ranks(body_moved, 2):
        assert kind == "RuntimeError" and "parameter or buffer 0 " in text and "before it is wrapped" in text, text
        assert seconds < DEADLINE
