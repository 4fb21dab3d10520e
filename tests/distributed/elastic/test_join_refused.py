"""Who does not get into a running job, and in which words: ``torchext.join_running_job``, and ``attach`` after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, mlp
from elastic_training import ElasticTraining
from harness import Rank, launch, run_ranks
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.errors import BackendOptionsError

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


def body_arguments(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta, got 5 \(int\); timedelta\(seconds="):
        torchext.join_running_job("hop", store=dist.HashStore(), timeout=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout must be more than 0 and at most 3650 days, got 0:00:00"):
        torchext.join_running_job("hop", store=dist.HashStore(), timeout=timedelta(0))
    for method in ("tcp://x:abc", "tcp://x:99999", "tcp://x:0", "tcp://x", "tcp://:29500", "bogus", "file://"):
        with pytest.raises(ValueError, match=rf"with a port in 1\.\.65535, got '{method}'"):
            torchext.join_running_job("hop", method)
    with pytest.raises(TypeError, match=r"init_method must be a str, got .*HashStore"):
        torchext.join_running_job("hop", dist.HashStore())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "localhost")
        for port in ("zzz", "", "-1", "65536"):
            patch.setenv("MASTER_PORT", port)
            with pytest.raises(
                ValueError, match=rf"MASTER_PORT in the environment must be in 1\.\.65535, got '{port}'"
            ):
                torchext.join_running_job("hop")
    with pytest.raises(TypeError, match=r"takes a process group of torch\.distributed, .* got 3 \(int\)"):
        torchext.backend_of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"backend must be one of 'dssync', 'hop', 'prague', got 'dear'"):
        torchext.join_running_job("dear")
    with pytest.raises(ValueError, match=r"init_method must be env://, tcp://host:port or file:///path, .*got 'tcp:4'"):
        torchext.join_running_job("hop", "tcp:4")
    with pytest.raises(ValueError, match=r"'env://' needs MASTER_ADDR and MASTER_PORT in the environment"):
        torchext.join_running_job("hop")
    with pytest.raises(BackendOptionsError, match=r"pass torchext\.HopOptions"):
        torchext.join_running_job("hop", pg_options=torchext.PragueOptions())
    assert not dist.is_initialized()
    torchext.join_running_job("prague", store=dist.HashStore(), timeout=timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match=r"torchext\.join_running_job after init_process_group"):
        torchext.join_running_job("prague", store=dist.HashStore())
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"no worker let this one in within 0\.5 s\. They do when all meet"):
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    assert time.monotonic() - start < 5
    with pytest.raises(dist.DistStoreError, match=r"no worker let this one in within 0\.5 s"):  # asks anew
        torchext.attach(ddp, optimizer, on_peer_failure="continue")
    dist.destroy_process_group()
    torchext.join_running_job("prague", store=dist.HashStore())
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"attached as those it joins are, with on_peer_failure='continue'"):
        torchext.attach(ddp, optimizer)
    assert dist.get_world_size() == 1


def test_arguments() -> None:
    run_ranks(body_arguments, 1)


def body_strangers(rank: Rank) -> Any:
    training = ElasticTraining(rank, "prague", {}, workers=2)
    store = dist.PrefixStore("torchext/newcomers", dist.FileStore(str(rank.folder / "store")))
    strange = ["hello", "[1]", "{}", '{"backend": "prague"}', '{"version": "9.9", "compression": "none"}']
    if rank.rank == 0:
        for text in strange:
            store.set(f"{store.add('count', 1)}/request", text)
    dist.barrier()
    for _ in range(2):
        training.train(2)
        with training.sync.averaged():
            pass
    refusals = [store.get(f"{number}/heard/1").decode() for number in range(1, len(strange) + 1)]
    dist.barrier()
    training.sync.detach()
    return training.sync.stats()["workers"], refusals


def test_what_is_no_request_is_refused_and_training_goes_on() -> None:
    for workers, refusals in run_ranks(body_strangers, 2):
        assert workers == 2
        assert all(refusal.startswith("its ") for refusal in refusals), refusals
