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


def body_skip_uneven(rank: Rank, queued: bool) -> int:
    """NaN in a step in which one rank has sent during the backward pass, and another has not."""
    use_path(queued)
    model = DistributedDataParallel(Uneven(), find_unused_parameters=True)
    optimizer = SPDKFAC(model, lr=0.1, inverse_update_steps=1)
    for step in range(8):
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, dtype=torch.float64)
        if step == 5 and rank.rank == 0:
            inputs[0, 0] = float("nan")
        times = 2 if step == 5 and rank.rank == 1 else 1
        model(inputs, times, extra=True).sin().sum(1).mean().backward()
        optimizer.step()
    equal_everywhere(model.module)
    return int(optimizer.stats()["skipped"])


def body_left_out(rank: Rank, interval: int, queued: bool) -> int:
    """Steps 3, 4 and 9 are left out by hand on all ranks. In step 3 factors leave on rank 0 only."""
    use_path(queued)
    model = DistributedDataParallel(Uneven())
    optimizer = SPDKFAC(model, lr=0.1, inverse_update_steps=interval)
    for step in range(14):
        optimizer.zero_grad()
        batch = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        times = 2 if step == 2 and rank.rank == 1 else 1  # so that rank 1 does not know what to expect of step 3
        model(batch, times, extra=True).sin().sum(1).mean().backward()
        if step not in (3, 4, 9):
            optimizer.step()
    equal_everywhere(model.module)
    assert torch.isfinite(flat(model.module)).all()
    return int(optimizer.stats()["steps"])


def body_left_out_empty(rank: Rank, queued: bool) -> int:
    """All ranks leave out step 5, in which rank 1 has an empty batch."""
    use_path(queued)
    model = DistributedDataParallel(Uneven())
    optimizer = SPDKFAC(model, lr=0.1, inverse_update_steps=1)
    for step in range(8):
        optimizer.zero_grad()
        batch = torch.randn(0 if step == 5 and rank.rank == 1 else 4, 6, dtype=torch.float64)
        model(batch, 1, extra=True).sin().sum().backward()
        if step != 5:
            optimizer.step()
    equal_everywhere(model.module)
    return int(optimizer.stats()["steps"])


@mostly_cpu
def test_steps_left_out_by_hand_on_all_ranks(queued: bool) -> None:
    cases = {
        "in every step": (body_left_out, 1, queued),
        "in every third": (body_left_out, 3, queued),
        "one rank had nothing": (body_left_out_empty, queued),
    }
    steps = values_in_one_group(cases, 2, timeout=20)
    assert steps == {"in every step": [11, 11], "in every third": [11, 11], "one rank had nothing": [7, 7]}


def body_left_out_on_one(rank: Rank, queued: bool) -> tuple[list[str], int]:
    use_path(queued)
    model = DistributedDataParallel(Net())
    optimizer = SPDKFAC(model, **{**OPTIONS, "inverse_update_steps": 1})
    train(model, optimizer, 4, rank=rank.rank, size=rank.size)
    errors = []
    for step in range(4, 9):
        image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(step))
        nn.functional.cross_entropy(model(image, token), target).backward()
        try:
            if step == 5 and rank.rank == 1:
                optimizer.zero_grad()
            else:
                optimizer.step()
        except dist.DistBackendError as error:
            errors.append(str(error))
        optimizer.zero_grad()
    equal_everywhere(model.module)  # it goes on: nobody has taken that step
    return errors, optimizer.stats()["steps"]


def body_left_out_early(rank: Rank, queued: bool) -> tuple[int, int, int]:
    """The same before the runs are planned anew, by what all ranks have seen of three sending steps."""
    use_path(queued)
    model = DistributedDataParallel(Net())
    options = {**OPTIONS, "inverse_update_steps": 1, "martens_decay": True}
    optimizer = SPDKFAC(model, **options)
    train(model, optimizer, 1, rank=rank.rank, size=rank.size)
    image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(1))
    nn.functional.cross_entropy(model(image, token), target).backward()
    before = flat(model.module)
    end = optimizer.zero_grad if rank.rank == 1 else optimizer.step
    with pytest.raises(dist.DistBackendError, match="rank 1 left out step 1"):
        end()
    assert torch.equal(flat(model.module), before)
    train(model, optimizer, 6, first=2, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    # As if that batch had never been.
    other = DistributedDataParallel(Net())
    spared = SPDKFAC(other, **options)
    for first, steps in ((0, 1), (2, 6)):
        train(other, spared, steps, first=first, rank=rank.rank, size=rank.size)
    torch.testing.assert_close(flat(model.module), flat(other.module), rtol=0, atol=1e-12)
    stats = optimizer.stats()
    return stats["steps"], stats["factor_updates"], stats["inverse_updates"]


@mostly_cpu
def test_a_step_left_out_on_one_rank_is_an_error_on_all_and_changes_nothing(queued: bool) -> None:
    cases = {"planned anew": (body_left_out_on_one, queued), "before": (body_left_out_early, queued)}
    found = values_in_one_group(cases, 3, timeout=20)
    for errors, steps in found["planned anew"]:
        assert len(errors) == 1
        assert "rank 1 left out step 5" in errors[0]
        assert "on all ranks alike" in errors[0]
        assert steps == 8
    assert found["before"] == [(7, 7, 7)] * 3


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
    assert found["a rank has sent"] == [1, 1, 1]
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


# What the first rank is told.
DIFFERENT = {
    "shape": ("DistBackendError", "layers[0] is the model itself, weight [4, 4] and bias, groups 1 on rank 0 and"),
    "count": ("DistBackendError", "the number of layers is 1 on rank 0 and 2 on rank 1"),
    "damping": ("DistBackendError", "damping is 0.2 on rank 0 and 0.1 on rank 1"),
    "kl_clip": ("DistBackendError", "kl_clip is None on rank 0 and 0.001 on rank 1"),
    "direction_precision": ("DistBackendError", "direction_precision is high on rank 0 and highest on rank 1"),
    "gather_rows": ("DistBackendError", "gather_rows is True on rank 0 and False on rank 1"),
    "shared_memory": ("DistBackendError", "shared_memory is True on rank 0 and False on rank 1"),
    "no layer": ("RuntimeError", "rank 1 could not build its optimizer"),
    "lr": ("RuntimeError", "rank 1 could not build its optimizer"),
    "misspelt": ("RuntimeError", "rank 1 could not build its optimizer"),
    "misspelt in front": ("RuntimeError", "rank 1 could not build its optimizer"),
    "strategy": ("RuntimeError", "rank 1 could not build its optimizer"),
}


def test_ranks_that_differ_are_told_at_construction() -> None:
    found = values_in_one_group({what: (body_different, what) for what in DIFFERENT}, 2, timeout=20)
    for what, ((kind, text, seconds), second) in found.items():
        error, message = DIFFERENT[what]
        assert kind == error and message in text and seconds < 15, (what, kind, text, seconds)
        if error == "DistBackendError":  # the second is told the same
            assert second[0] == error and message in second[1], (what, second)
