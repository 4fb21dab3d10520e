"""Distributed K-FAC where something goes wrong: steps left out, NaN, ranks that differ."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank, elapsed_error, run_ranks
from kfac_net import EXACT, OPTIONS, Net, Uneven, mostly_cpu, train, use_path, whole_batch
from rows import values_in_one_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC, SPDKFAC, KFACPreconditioner

pytestmark = pytest.mark.sanitize


def all_left(optimizer: KFAC, before: int) -> bool:
    """Whether all factors have left during a backward pass; before: how many runs had left in that of others."""
    runs = 1 + max(factor["run"] for factor in optimizer.plan().as_dict["factors"])
    return bool(optimizer.stats()["runs_overlapped"] - before == runs)


def uneven_batch(rank: Rank, step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank.rank))


def body_skip_uneven(rank: Rank, queued: bool) -> tuple[int, bool]:
    """NaN in a step in which all factors of some ranks leave during the backward pass, and those of another do not."""
    use_path(queued)
    flats, early = [], False
    for there in (False, True):
        model = DistributedDataParallel(Uneven(), find_unused_parameters=True)
        optimizer = SPDKFAC(model, lr=0.1, inverse_update_steps=1, shared_memory=False)
        for step in range(8):
            nan = step == 5
            if nan and not there:
                continue
            optimizer.zero_grad()
            before = optimizer.stats()["runs_overlapped"]
            inputs = uneven_batch(rank, step)
            if nan and rank.rank == 0:
                inputs[0, 0] = float("nan")
            odd = nan and rank.rank == 1
            model(inputs, 2 if odd else 1, extra=not odd).sin().sum(1).mean().backward()
            early = all_left(optimizer, before) if nan else early
            optimizer.step()
        equal_everywhere(model.module)
        flats.append(flat(model.module))
    torch.testing.assert_close(*flats, rtol=0, atol=1e-9)
    return int(optimizer.stats()["skipped"]), early


def body_left_out(rank: Rank, interval: int, queued: bool) -> tuple[int, bool]:
    """Steps 3, 4 and 9 are left out by hand on all ranks. In step 3 all factors leave early on rank 0 only."""
    use_path(queued)
    flats, early = [], False
    for there in (False, True):
        model = DistributedDataParallel(Uneven())
        optimizer = SPDKFAC(model, lr=0.1, inverse_update_steps=interval, shared_memory=False)
        for step in range(14):
            left_out = step in (3, 4, 9)
            if left_out and not there:
                continue
            optimizer.zero_grad()
            before = optimizer.stats()["runs_overlapped"]
            times = 2 if step == 2 and rank.rank == 1 else 1  # so that rank 1 does not know what to expect of step 3
            model(uneven_batch(rank, step), times, extra=True).sin().sum(1).mean().backward()
            early = all_left(optimizer, before) if step == 3 else early
            if not left_out:
                optimizer.step()
        equal_everywhere(model.module)
        flats.append(flat(model.module))
    torch.testing.assert_close(*flats, rtol=0, atol=1e-9)
    return int(optimizer.stats()["steps"]), early


def body_left_out_empty(rank: Rank, queued: bool) -> tuple[int, bool]:
    """All ranks leave out step 5, in which rank 1 has an empty batch."""
    use_path(queued)
    flats, early = [], False
    for there in (False, True):
        model = DistributedDataParallel(Uneven())
        optimizer = SPDKFAC(model, lr=0.1, inverse_update_steps=1, shared_memory=False)
        for step in range(8):
            left_out = step == 5
            if left_out and not there:
                continue
            optimizer.zero_grad()
            before = optimizer.stats()["runs_overlapped"]
            rows = 0 if left_out and rank.rank == 1 else 4
            model(uneven_batch(rank, step, rows), 1, extra=True).sin().sum().backward()
            if left_out:
                early = all_left(optimizer, before)
            else:
                optimizer.step()
        equal_everywhere(model.module)
        flats.append(flat(model.module))
    torch.testing.assert_close(*flats, rtol=0, atol=1e-9)
    return int(optimizer.stats()["steps"]), early


@mostly_cpu
def test_steps_left_out_by_hand_on_all_ranks(queued: bool) -> None:
    cases = {
        "in every step": (body_left_out, 1, queued),
        "in every third": (body_left_out, 3, queued),
        "one rank had nothing": (body_left_out_empty, queued),
    }
    steps = values_in_one_group(cases, 2, timeout=20)
    taken = {"in every step": 11, "in every third": 11, "one rank had nothing": 7}
    assert steps == {name: [(count, True), (count, False)] for name, count in taken.items()}


def body_left_out_on_one(rank: Rank, step: int, shared: bool, queued: bool) -> tuple[bool, tuple[int, int, int]]:
    """Rank 1 leaves a step out; whether all factors had left by then, and what has been counted in the end."""
    use_path(queued)
    model = DistributedDataParallel(Net())
    options = {**OPTIONS, "inverse_update_steps": 1, "martens_decay": True, "shared_memory": shared}
    optimizer = SPDKFAC(model, **options)
    train(model, optimizer, step, rank=rank.rank, size=rank.size)
    overlapped = optimizer.stats()["runs_overlapped"]
    image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(image, token), target).backward()
    early = all_left(optimizer, overlapped)
    before = flat(model.module)
    end = optimizer.zero_grad if rank.rank == 1 else optimizer.step
    with pytest.raises(dist.DistBackendError, match=f"rank 1 left out step {step} .* on all ranks alike"):
        end()
    assert torch.equal(flat(model.module), before)
    train(model, optimizer, 7 - step, first=step + 1, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    # As if that batch had never been.
    other = DistributedDataParallel(Net())
    spared = SPDKFAC(other, **options)
    for first, steps in ((0, step), (step + 1, 7 - step)):
        train(other, spared, steps, first=first, rank=rank.rank, size=rank.size)
    torch.testing.assert_close(flat(model.module), flat(other.module), rtol=0, atol=1e-12)
    stats = optimizer.stats()
    return early, (stats["steps"], stats["factor_updates"], stats["inverse_updates"])


@mostly_cpu
def test_a_step_left_out_on_one_rank_is_an_error_on_all_and_changes_nothing(queued: bool) -> None:
    cases = {
        "nothing has left": (body_left_out_on_one, 1, True, queued),
        "factors have left": (body_left_out_on_one, 5, False, queued),
    }
    found = values_in_one_group(cases, 3, timeout=20)
    assert found == {name: [(name == "factors have left", (7, 7, 7))] * 3 for name in cases}


def body_uneven(rank: Rank, queued: bool) -> list[bool]:
    use_path(queued)
    rank.init("gloo")
    finite = []
    for strategy in EXACT:
        model = DistributedDataParallel(Uneven(), find_unused_parameters=True)
        optimizer = KFAC(model, strategy=strategy, lr=0.1, inverse_update_steps=1)
        for step in range(10):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, dtype=torch.float64)
            times = 1 + (step + rank.rank) % 3 if step > 5 else 1
            model(inputs, times, extra=step % 2 == rank.rank % 2).sin().sum(1).mean().backward()
            optimizer.step()
        equal_everywhere(model.module)
        finite.append(bool(torch.isfinite(flat(model.module)).all()))
    return finite


@mostly_cpu
def test_ranks_that_call_layers_differently_stay_equal(queued: bool) -> None:
    assert all(all(finite) for finite in run_ranks(body_uneven, 3, queued))


def body_nan(rank: Rank, queued: bool) -> list[tuple[int, float]]:
    use_path(queued)
    results = []
    for strategy in ("spd", "pad", "mem-opt"):
        models = [DistributedDataParallel(Net()) for _ in range(2)]
        optimizers = [KFAC(model, strategy=strategy, **(OPTIONS | {"inverse_update_steps": 1})) for model in models]
        for step in range(6):
            train(models[0], optimizers[0], 1, first=step, rank=rank.rank, size=rank.size)
            if step in (0, 4):
                before = flat(models[1].module)
                optimizers[1].zero_grad()
                image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(99))
                if rank.rank == 1:
                    image[0, 0, 2, 2] = float("nan")
                nn.functional.cross_entropy(models[1](image, token), target).backward()
                optimizers[1].step()
                assert torch.equal(flat(models[1].module), before)
            train(models[1], optimizers[1], 1, first=step, rank=rank.rank, size=rank.size)
        difference = (flat(models[0].module) - flat(models[1].module)).abs().max()
        results.append((optimizers[1].stats()["skipped"], float(difference)))
    return results


def body_overflow(rank: Rank, queued: bool) -> int:
    """Rank 1's inputs have squares beyond float32, its gradients are finite."""
    use_path(queued)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    optimizer = SPDKFAC(model, lr=0.1, inverse_update_steps=1)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.full((2, 3), 1e25 if rank.rank == 1 and step == 2 else 1.0)
        (model(inputs) * (1e-20 if rank.rank == 1 and step == 2 else 1.0)).sum(1).mean().backward()
        optimizer.step()
    equal_everywhere(model.module)
    assert torch.isfinite(flat(model.module)).all()
    return int(optimizer.stats()["factors_left_out"])


@mostly_cpu
def test_what_is_not_finite_on_one_rank_is_skipped_or_left_out(queued: bool) -> None:
    cases = {
        "nan": (body_nan, queued),
        "a rank has sent": (body_skip_uneven, queued),
        "overflow": (body_overflow, queued),
    }
    found = values_in_one_group(cases, 3, timeout=20)
    for results in found["nan"]:
        assert all(skipped == 2 and difference < 1e-12 for skipped, difference in results), results
    assert found["a rank has sent"] == [(1, True), (1, False), (1, True)]
    assert found["overflow"] == [0, 1, 0]


def differing(what: str, second: bool) -> None:
    """Makes an optimizer that is another one on the second rank."""
    if what == "no layer":
        KFAC(nn.LayerNorm(4) if second else nn.Linear(4, 4))
    elif what == "shape":
        KFAC(nn.Linear(4, 5 if second else 4))
    elif what == "count":
        KFAC(nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if second else [])))
    elif what == "misspelt":
        SPDKFAC(nn.Linear(4, 4), **({"dampng": 1.0} if second else {}))
    elif what == "misspelt in front":
        KFACPreconditioner(nn.Linear(4, 4), **({"dampng": 1.0} if second else {}))
    elif what == "strategy":
        SPDKFAC(nn.Linear(4, 4), **({"strategy": "pad"} if second else {}))
    else:
        values = {
            "kl_clip": (None, 1e-3),
            "damping": (0.2, 0.1),
            "lr": (1.0, -1.0),
            "direction_precision": ("high", "highest"),
            "gather_rows": (True, False),
            "shared_memory": (True, False),
        }
        KFAC(nn.Linear(4, 4), **{what: values[what][second]})


def body_different(rank: Rank, what: str) -> tuple[str, str, float]:
    torch.manual_seed(0)
    return elapsed_error(lambda: differing(what, rank.rank == 1))


# What both ranks are told.
DIFFERENT = {
    "shape": "layers[0] is the model itself, weight [4, 4] and bias, groups 1 on rank 0 and",
    "count": "the number of layers is 1 on rank 0 and 2 on rank 1",
    "damping": "damping is 0.2 on rank 0 and 0.1 on rank 1",
    "kl_clip": "kl_clip is None on rank 0 and 0.001 on rank 1",
    "direction_precision": "direction_precision is high on rank 0 and highest on rank 1",
    "gather_rows": "gather_rows is True on rank 0 and False on rank 1",
    "shared_memory": "shared_memory is True on rank 0 and False on rank 1",
}
# What is wrong on the second alone, and its own error.
REFUSED = {
    "no layer": ("NoSupportedLayerError", "the model has no Linear, Conv1d/2d/3d or Embedding layer"),
    "lr": ("ValueError", "lr = -1.0: allowed 0 or more, finite"),
    "misspelt": ("TypeError", "SPDKFAC: no argument dampng: allowed lr"),
    "misspelt in front": ("TypeError", "KFACPreconditioner: no argument dampng: allowed optimizer"),
    "strategy": ("TypeError", 'SPDKFAC: strategy is always "spd" here'),
}


def test_ranks_that_differ_are_told_at_construction() -> None:
    names = [*DIFFERENT, *REFUSED]
    found = values_in_one_group({what: (body_different, what) for what in names}, 2, timeout=20)
    for what, errors in found.items():
        told = [("DistBackendError", DIFFERENT.get(what, ""))] * 2
        if what in REFUSED:
            told = [("RuntimeError", "rank 1 could not build its optimizer; its own error says why"), REFUSED[what]]
        for (kind, text, seconds), (error, message) in zip(errors, told, strict=True):
            assert kind == error and message in text and seconds < 15, (what, kind, text, seconds)
