"""Who does not get into a running job, and in which words: ``torchext.join_running_job``, and ``attach`` after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, mlp
from elastic_training import ElasticTraining
from harness import Rank, launch
from torch.nn.parallel import DistributedDataParallel

import torchext

pytestmark = pytest.mark.sanitize


def refused(
    rank: Rank,
    match: str,
    module: torch.nn.Module,
    backend: str = "prague",
    options: Any = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> None:
    """make_optimizer: of the parameters."""
    torchext.join_running_job(backend, f"file://{rank.folder / 'store'}", pg_options=options)
    ddp = DistributedDataParallel(module)
    optimizer = make_optimizer(list(ddp.parameters()), lr=0.1)
    with pytest.raises(ValueError, match=match):
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    dist.destroy_process_group()


def in_groups(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=lr)


def in_another_order(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[::-1], lr=lr)


def body_third(rank: Rank, first: Callable[[Rank], None]) -> Any:
    """Ranks 0 and 1 train; rank 2 does something first, and then it joins them."""
    if rank.rank == 2:
        rank.pause()
        first(rank)
    training = ElasticTraining(rank, "prague", {}, workers=2)
    if rank.rank < 2:
        rank.report("trains")
    training.grow_to(3)
    equal_everywhere(training.ddp.module)
    return training.sync.stats()["joined_ranks"]


def the_third_is_let_in_after(first: Callable[[Rank], None]) -> None:
    with launch(body_third, 3, first) as ranks:
        ranks.expect("trains", [0, 1])
        ranks.proceed([2])
        assert ranks.values() == [[2]] * 3


def is_refused(rank: Rank) -> None:
    other = torch.nn.Linear(3, 3)
    its = r"its options is Prague.*sync_period=2.* the job's is .*sync_period=1"
    refused(rank, its, other, options=torchext.PragueOptions(sync_period=2))
    its = r"its model has weight \(float32, \(3, 3\), strides \(3, 1\)\) where the job's has \S+ \("
    refused(rank, its, other)
    refused(rank, r"its backend is hop, the job's is prague", other, backend="hop")
    transposed = mlp()
    transposed[2].weight = torch.nn.Parameter(transposed[2].weight.detach().t())  # a square one
    its = r"its model has 2\.weight \(.*, strides \(1, 16\)\) where the job's has 2\.weight \(.*, strides \(16, 1\)\)"
    refused(rank, its, transposed)
    its = r"its optimizer is Adam, the job's is SGD"
    refused(rank, its, mlp(), make_optimizer=torch.optim.Adam)
    its = r"its optimizer has groups of 2, 4 parameters, the job's has groups of 6"
    refused(rank, its, mlp(), make_optimizer=in_groups)
    its = r"its optimizer has 4\.bias at place 0 of group 0, where the job's has 0\.weight"
    refused(rank, its, mlp(), make_optimizer=in_another_order)


def test_who_does_not_fit_is_refused_and_the_job_goes_on() -> None:
    the_third_is_let_in_after(is_refused)


def attaches_twice(_: Rank) -> None:
    """What attach refuses by itself costs a newcomer nothing, nor the others: the next call is let in."""
    real = torchext.attach

    def attach(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, **arguments: Any) -> Any:
        with pytest.raises(ValueError, match=r"with on_peer_failure='continue'"):
            real(ddp, optimizer)
        refused = DistributedDataParallel(torch.nn.Linear(2, 2))
        refused.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
        with pytest.raises(ValueError, match=r"has a communication hook"):
            real(refused, torch.optim.SGD(refused.parameters(), lr=0.1), **arguments)
        return real(ddp, optimizer, **arguments)

    torchext.attach = attach


def test_a_newcomer_may_attach_again() -> None:
    the_third_is_let_in_after(attaches_twice)
