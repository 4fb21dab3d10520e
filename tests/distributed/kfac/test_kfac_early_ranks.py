"""Directions made before ranks average gradients: every strategy is one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from dense_net import Dense, batch
from harness import Rank, run_ranks
from kfac_net import OPTIONS, Net, both, run_alone, train, use_path
from torch.nn.parallel import DistributedDataParallel

import torchext
from torchext.optim import KFAC, KFACPreconditioner

STRATEGIES = ("spd", "pad", "comm-opt", "d-kfac", "auto")
STEPS = 8


def body(rank: Rank, shared: bool, queued: bool) -> dict[str, float]:
    use_path(queued)
    rank.init("gloo")
    expected = run_alone(rank, STEPS, "inverse")
    start = flat(Net())
    errors = {}
    for strategy in STRATEGIES:
        for split in (None, True):
            model = DistributedDataParallel(Net())
            optimizer = KFAC(
                model,
                strategy=strategy,
                split_directions=split,
                shared_memory=shared,
                early_directions=True,
                exchange_always=split is True,
                **OPTIONS,
            )
            train(model, optimizer, STEPS, rank=rank.rank, size=rank.size)
            equal_everywhere(model.module)
            assert optimizer.stats()["early_directions"] == 2 * 5  # two layers; steps 0, 3 and 6 make inverses
            error = (flat(model.module) - expected).abs().max() / (expected - start).abs().max()
            errors[f"{strategy} {split}"] = float(error)
    return errors


@both
@pytest.mark.parametrize(("size", "shared"), [(1, True), (2, True), (2, False), (3, True), (4, False)])
def test_every_strategy_is_one_process_with_the_whole_batch(size: int, shared: bool, queued: bool) -> None:
    for errors in run_ranks(body, size, shared, queued):
        assert max(errors.values()) < 1e-9, errors


def body_quiet(rank: Rank) -> int:
    """Bytes that a step without an update of the inverses sends."""
    rank.init("gloo")
    model = DistributedDataParallel(Dense())
    optimizer = KFAC(
        model, strategy="spd", split_directions=True, shared_memory=False, early_directions=True, **OPTIONS
    )
    sent = []
    for step in range(STEPS):
        before = sum(value for name, value in optimizer.stats().items() if name.endswith("_bytes"))
        optimizer.zero_grad()
        model(batch(step).chunk(rank.size)[rank.rank]).square().mean().backward()
        optimizer.step()
        after = sum(value for name, value in optimizer.stats().items() if name.endswith("_bytes"))
        sent.append(after - before)
    assert all(sent[step] > 1000 for step in (0, 3, 6)), sent
    return max(sent[step] for step in (4, 5, 7))


def test_no_direction_travels_between_updates() -> None:
    # Two numbers to each other rank: the clip's, and whether gradients were seen.
    assert run_ranks(body_quiet, 3) == [2 * 16] * 3


def body_uneven(rank: Rank) -> float:
    """Rank 0 has more rows than the layers are wide, the last one leaves a layer out in some steps."""
    rank.init("gloo")
    rows = (90, 20, 10)
    models = [DistributedDataParallel(Dense(), find_unused_parameters=True) for _ in range(2)]
    optimizers = [
        KFAC(model, strategy="spd", early_directions=early, **OPTIONS)
        for model, early in zip(models, (False, True), strict=True)
    ]
    for step in range(STEPS):
        mine = torch.randn(
            rows[rank.rank], 10, generator=torch.Generator().manual_seed(10 * step + rank.rank), dtype=torch.float64
        )
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(mine, seldom=rank.rank < 2 or step % 2 == 0).square().mean().backward()
            optimizer.step()
    for model in models:
        equal_everywhere(model.module)
    late, early = (flat(model.module) for model in models)
    return float((late - early).abs().max() / (late - flat(Dense())).abs().max())


def test_ranks_whose_batches_differ() -> None:
    assert max(run_ranks(body_uneven, 3)) < 1e-9


def body_no_sync(rank: Rank) -> float:
    """Gradients are accumulated without averaging, then averaged; under a scaler."""
    rank.init("gloo")
    found = []
    for early in (False, True):
        model = DistributedDataParallel(Dense(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        KFACPreconditioner(
            model, optimizer, strategy="pad", early_directions=early, damping=0.01, inverse_update_steps=3
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = batch(step).float().chunk(rank.size)[rank.rank].chunk(2)
            with model.no_sync():
                scaler.scale(model(parts[0]).square().mean() / 2).backward()
            scaler.scale(model(parts[1]).square().mean() / 2).backward()
            scaler.step(optimizer)
            scaler.update()
        equal_everywhere(model.module)
        found.append(flat(model.module))
    return float((found[0] - found[1]).abs().max() / (found[0] - flat(Dense(torch.float32))).abs().max())


def test_accumulation_without_averaging_and_a_scaler() -> None:
    assert max(run_ranks(body_no_sync, 2)) < 1e-4


def steps(rank: Rank, count: int, queued: bool) -> tuple[DistributedDataParallel, KFAC]:
    use_path(queued)
    rank.init("gloo", timeout=20)
    model = DistributedDataParallel(Dense())
    optimizer = KFAC(model, early_directions=True, **OPTIONS)
    for step in range(count):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def body_penalty(rank: Rank, queued: bool) -> str:
    """One rank's loss has a penalty that directions of its layer's calls would leave out."""
    model, optimizer = steps(rank, 2, queued)
    before = flat(model.module)
    loss = model(batch(2)).square().mean()
    if rank.rank == 1:
        loss = loss + 1e-3 * model.module.seldom.weight.square().sum()
    loss.backward()
    with pytest.raises(ValueError, match="not those of its calls") as caught:
        optimizer.step()
    assert torch.equal(flat(model.module), before)
    for step in range(2, 6):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    equal_everywhere(model.module)
    assert optimizer.stats()["steps"] == 6
    return str(caught.value)


@both
def test_a_penalty_on_one_rank_is_refused_on_all(queued: bool) -> None:
    for message in run_ranks(body_penalty, 3, queued):
        assert message.startswith("torchext.optim: on rank 1 the gradients of seldom are not")


def body_by_hand(rank: Rank, queued: bool) -> None:
    model, optimizer = steps(rank, 2, queued)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"no backward\(\) has put into \.grad"):
        optimizer.step()


@both
def test_gradients_by_hand_are_refused_on_all_ranks(queued: bool) -> None:
    run_ranks(body_by_hand, 2, queued)


def body_nan(rank: Rank, queued: bool) -> int:
    model, optimizer = steps(rank, 2, queued)
    before = flat(model.module)
    inputs = batch(2)
    inputs[0, 0] = float("nan") if rank.rank == 1 else 0.0
    model(inputs).square().mean().backward()
    optimizer.step()
    assert torch.equal(flat(model.module), before)
    return int(optimizer.stats()["skipped"])


@both
def test_a_batch_that_is_not_finite_on_one_rank_is_skipped_on_all(queued: bool) -> None:
    assert run_ranks(body_nan, 2, queued) == [1, 1]


def body_options(rank: Rank) -> str:
    rank.init("gloo", timeout=20)
    with pytest.raises(dist.DistBackendError) as caught:
        KFAC(DistributedDataParallel(Dense()), early_directions=rank.rank == 0)
    return str(caught.value)


def test_ranks_agree_on_the_option() -> None:
    for message in run_ranks(body_options, 2):
        assert "early_directions" in message


def body_dear(rank: Rank, attached_first: bool) -> None:
    rank.init("dear", timeout=20, pg_options=torchext.DeAROptions(form="replicated"))
    model = DistributedDataParallel(Dense(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def attach() -> None:
        torchext.attach(model, optimizer)

    def precondition() -> Any:
        return KFACPreconditioner(model, optimizer, early_directions=True)

    first, second = (attach, precondition) if attached_first else (precondition, attach)
    kept = first()
    with pytest.raises(ValueError, match="early_directions = True under dear"):
        second()
    del kept


@pytest.mark.parametrize("attached_first", [False, True])
def test_dear_is_refused(attached_first: bool) -> None:
    run_ranks(body_dear, 2, attached_first)
