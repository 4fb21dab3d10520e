"""K-FAC over several ranks: every strategy is one process with the whole batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank, launch, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.errors import KFACStateError
from torchext.optim import KFAC, PADKFAC, SPDKFAC, KFACPreconditioner

EXACT = ("spd", "pad", "comm-opt", "mem-opt", "hybrid", "d-kfac", "auto")
ROWS = 12  # of the whole batch: divisible by 1, 2, 3, 4


class Net(nn.Module):
    """Convolutions, one of them grouped, an embedding, a normalisation that is left alone, and Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2, stride=2)
        self.tokens = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(22)
        self.hidden = nn.Linear(22, 9)
        self.head = nn.Linear(9, 3, bias=False)
        self.double()

    def forward(self, image: Tensor, token: Tensor) -> Tensor:
        x = self.grouped(torch.tanh(self.conv(image))).flatten(1)
        x = self.norm(torch.cat([x, self.tokens(token)], 1))
        return self.head(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]


def whole_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(ROWS, 1, 5, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, 7, (ROWS,), generator=generator),
        torch.randint(0, 3, (ROWS,), generator=generator),
    )


def train(model: nn.Module, optimizer: Any, steps: int, *, first: int = 0, rank: int = 0, size: int = 1) -> None:
    for step in range(first, first + steps):
        image, token, target = (part.chunk(size)[rank] for part in whole_batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, token), target).backward()
        optimizer.step()


OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.01, "inverse_update_steps": 3}


def body_strategies(rank: Rank, methods: tuple[str, ...]) -> dict[str, float]:
    rank.init("gloo")
    worst = {}
    for method in methods:
        for always in (False, True):
            steps = 8
            expected = None
            for strategy in EXACT:
                model = DistributedDataParallel(Net())
                optimizer = KFAC(model, strategy=strategy, method=method, exchange_always=always, **OPTIONS)
                train(model, optimizer, steps, rank=rank.rank, size=rank.size)
                equal_everywhere(model.module)
                if expected is None:
                    # No process group is touched with a world of one rank.
                    expected = run_alone(rank, steps, method)
                error = (flat(model.module) - expected).abs().max() / expected.abs().max()
                worst[f"{strategy} {method} {always}"] = float(error)
    return worst


def run_alone(rank: Rank, steps: int, method: str) -> Tensor:
    """The whole batch in one process, with a group of one for K-FAC."""
    groups = [dist.new_group([r]) for r in range(rank.size)]
    model = Net()
    train(model, KFAC(model, method=method, process_group=groups[rank.rank], **OPTIONS), steps)
    return flat(model)


def body_split(rank: Rank) -> tuple[float, int]:
    """Shares of directions by columns, of every layer that can be split."""
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="spd", split_directions=True, **OPTIONS)
    train(model, optimizer, 6, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    expected = run_alone(rank, 6, "inverse")
    assert optimizer.plan().as_dict["split_directions"]
    return float((flat(model.module) - expected).abs().max() / expected.abs().max()), optimizer.stats()["sent_bytes"]


@pytest.mark.parametrize("size", [2, 3])
def test_directions_split_by_columns_are_the_same(size: int) -> None:
    outcomes = run_ranks(body_split, size)
    for error, _ in outcomes:
        assert error < 1e-9
    # Linear and ungrouped convolutions, in each step, to all other ranks.
    assert sum(sent for _, sent in outcomes) >= (size - 1) * 6 * 8 * (4 * 10 + 9 * 23 + 3 * 9)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_exact_strategy_is_one_process_with_the_whole_batch(size: int) -> None:
    for worst in run_ranks(body_strategies, size, ("inverse", "eigen")):
        assert max(worst.values()) < 1e-5, worst


def body_dp(rank: Rank) -> float:
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="dp", **OPTIONS)
    train(model, optimizer, 6, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    assert optimizer.stats()["all_reduce_bytes"] == 0
    assert optimizer.stats()["reduce_bytes"] == 0
    # With the same batch on all ranks, what an owner sees is what all see.
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy="dp", **OPTIONS)
    train(model, optimizer, 6)
    expected = run_alone(rank, 6, "inverse")
    return float((flat(model.module) - expected).abs().max())


def test_dp_uses_the_owners_own_factors() -> None:
    assert max(run_ranks(body_dp, 3)) < 1e-9


def triangle(dim: int) -> int:
    return dim * (dim + 1) // 2


# (A, G) of Net's layers; two groups of the grouped convolution; a diagonal A of the embedding.
ELEMENTS = [
    (triangle(10), triangle(4)),
    (2 * triangle(19), 2 * triangle(2)),
    (7, triangle(6)),
    (triangle(23), triangle(9)),
    (triangle(9), triangle(3)),
]
FACTOR_BYTES = 8 * sum(a + g for a, g in ELEMENTS)
VERDICTS = 4 * 3  # a byte from each of four ranks to each other, in a step that sends


def body_bytes(rank: Rank) -> dict[str, dict[str, Any]]:
    rank.init("gloo")
    found = {}
    for strategy in ("spd", "pad", "comm-opt", "mem-opt", "hybrid", "d-kfac"):
        model = DistributedDataParallel(Net())
        optimizer = KFAC(model, strategy=strategy, worker_fraction=0.5, split_directions=False, **OPTIONS)
        before = optimizer.stats()
        train(model, optimizer, 6, rank=rank.rank, size=rank.size)  # two updates of the inverses
        after = optimizer.stats()
        found[strategy] = {name: after[name] - before[name] for name in after if name.endswith("_bytes")}
        found[strategy]["placed"] = [f["owner"] >= 0 for f in optimizer.plan().as_dict["factors"]]
    return found


def test_only_triangles_travel_and_only_when_inverses_are_made() -> None:
    outcomes = run_ranks(body_bytes, 4)
    gradient = 8 * (4 * 10 + 4 * 19 + 7 * 6 + 9 * 23 + 3 * 9)
    for found in outcomes:
        for strategy in ("comm-opt", "mem-opt", "hybrid", "d-kfac", "spd"):
            assert found[strategy]["all_reduce_bytes"] == 2 * FACTOR_BYTES, strategy
            assert found[strategy]["broadcast_bytes"] == 0, strategy
        assert found["pad"]["reduce_bytes"] == 2 * FACTOR_BYTES
    sent = {name: sum(found[name]["sent_bytes"] for found in outcomes) - 2 * VERDICTS for name in outcomes[0]}
    assert sent["comm-opt"] == 3 * 2 * FACTOR_BYTES  # inverses, to the three others
    assert sent["mem-opt"] == 3 * 6 * gradient
    assert sent["hybrid"] == 2 * FACTOR_BYTES + 2 * 6 * gradient  # one more worker; two that are none
    assert sent["d-kfac"] == 0


def body_overlap(rank: Rank) -> tuple[int, int]:
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = SPDKFAC(model, lr=0.1, damping=0.01, inverse_update_steps=1)
    train(model, optimizer, 10, rank=rank.rank, size=rank.size)
    stats = optimizer.stats()
    return stats["runs"], stats["runs_overlapped"]


def test_runs_leave_during_the_backward_pass() -> None:
    """From the third step on: the first two show how often a layer is called."""
    for runs, overlapped in run_ranks(body_overlap, 2):
        assert 0 < overlapped < runs
        assert overlapped >= 0.7 * runs


def body_skip_uneven(rank: Rank) -> int:
    """NaN in a step in which one rank has sent during the backward pass, and another has not."""
    rank.init("gloo", timeout=20)
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


def test_a_skipped_step_ends_what_it_had_sent() -> None:
    assert run_ranks(body_skip_uneven, 2) == [1, 1]


def body_left_out(rank: Rank, interval: int) -> int:
    """Steps 3, 4 and 9 are left out by hand on all ranks. In step 3 factors leave on rank 0 only."""
    rank.init("gloo", timeout=20)
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


@pytest.mark.parametrize("interval", [1, 3])
def test_steps_left_out_by_hand_on_all_ranks(interval: int) -> None:
    assert run_ranks(body_left_out, 2, interval) == [11, 11]


def body_left_out_on_one(rank: Rank) -> tuple[list[str], int]:
    rank.init("gloo", timeout=20)
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


def test_a_step_left_out_on_one_rank_is_an_error_on_all() -> None:
    for errors, steps in run_ranks(body_left_out_on_one, 3):
        assert len(errors) == 1
        assert "rank 1 left out step 5" in errors[0]
        assert "on all ranks alike" in errors[0]
        assert steps == 8


class Uneven(nn.Module):
    """Calls a layer as often as it is told, and one only where it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, inputs: Tensor, times: int, extra: bool) -> Tensor:
        for _ in range(times):
            inputs = torch.tanh(self.body(inputs))
        return self.head(self.extra(inputs) if extra else inputs)  # type: ignore[no-any-return]


def body_uneven(rank: Rank) -> list[bool]:
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


def test_ranks_that_call_layers_differently_stay_equal() -> None:
    assert all(all(finite) for finite in run_ranks(body_uneven, 3))


def body_nan(rank: Rank) -> list[tuple[int, float]]:
    rank.init("gloo")
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


def test_nan_on_one_rank_skips_the_step_on_all() -> None:
    for results in run_ranks(body_nan, 3):
        assert all(skipped == 2 and difference < 1e-12 for skipped, difference in results), results


def body_overflow(rank: Rank) -> int:
    """Rank 1's inputs have squares beyond float32, its gradients are finite."""
    rank.init("gloo")
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


def test_an_overflow_on_one_rank_is_left_out_there() -> None:
    assert run_ranks(body_overflow, 2) == [0, 1]


def body_no_sync(rank: Rank) -> float:
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = PADKFAC(model, **OPTIONS)
    for step in range(6):
        optimizer.zero_grad()
        image, token, target = (part.chunk(rank.size)[rank.rank] for part in whole_batch(step))
        with model.no_sync():
            (nn.functional.cross_entropy(model(image[:2], token[:2]), target[:2]) / 2).backward()
        (nn.functional.cross_entropy(model(image[2:], token[2:]), target[2:]) / 2).backward()
        optimizer.step()
    expected = run_alone(rank, 6, "inverse")
    return float((flat(model.module) - expected).abs().max() / expected.abs().max())


def test_gradient_accumulation_under_no_sync() -> None:
    assert max(run_ranks(body_no_sync, 3)) < 1e-5


def body_preconditioner(rank: Rank) -> float:
    rank.init("gloo")
    flats = []
    for _ in range(2):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        KFACPreconditioner(model, optimizer, strategy="pad", inverse_update_steps=2)
        train(model, optimizer, 4, rank=rank.rank, size=rank.size)
        equal_everywhere(model.module)
        flats.append(flat(model.module))
    return float((flats[0] - flats[1]).abs().max())


def test_in_front_of_another_optimizer() -> None:
    assert max(run_ranks(body_preconditioner, 2)) == 0


def body_save(rank: Rank, strategy: str) -> Any:
    rank.init("gloo")
    model = DistributedDataParallel(Net())
    optimizer = KFAC(model, strategy=strategy, **OPTIONS)
    train(model, optimizer, 4, rank=rank.rank, size=rank.size)
    state = copy.deepcopy(optimizer.state_dict())  # torch's refers to the live buffers
    train(model, optimizer, 4, first=4, rank=rank.rank, size=rank.size)
    return {"optimizer": state, "flat": flat(model.module)}


def body_resume(rank: Rank, strategy: str, saved: Any, weights: Any) -> float:
    rank.init("gloo")
    module = Net()
    module.load_state_dict(weights)
    model = DistributedDataParallel(module)
    optimizer = KFAC(model, strategy=strategy, **OPTIONS)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # the test sends both ranks the same memory
    train(model, optimizer, 4, first=4, rank=rank.rank, size=rank.size)
    equal_everywhere(model.module)
    return float((flat(model.module) - saved["flat"]).abs().max() / saved["flat"].abs().max())


def weights_after(steps: int) -> Any:
    model = Net()
    train(model, KFAC(model, **OPTIONS), steps)
    return model.state_dict()


@pytest.mark.parametrize(("before", "after"), [("pad", "spd"), ("mem-opt", "pad")])
def test_a_checkpoint_loads_at_another_world_size_and_strategy(before: str, after: str) -> None:
    weights = weights_after(4)
    saved = run_ranks(body_save, 3, before)[0]
    assert max(run_ranks(body_resume, 2, after, saved, weights)) < 1e-5


def body_different(rank: Rank, what: str) -> None:
    rank.init("gloo", timeout=20)
    torch.manual_seed(0)
    second = rank.rank == 1
    if what == "no layer":
        KFAC(nn.LayerNorm(4) if second else nn.Linear(4, 4))
    elif what == "shape":
        KFAC(nn.Linear(4, 5 if second else 4))
    elif what == "count":
        KFAC(nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if second else [])))
    elif what == "damping":
        KFAC(nn.Linear(4, 4), damping=0.1 if second else 0.2)
    elif what == "lr":
        KFAC(nn.Linear(4, 4), lr=-1.0 if second else 1.0)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("shape", "DistBackendError", "names and shapes of the layers"),
        ("count", "DistBackendError", "the number of layers is 1 on rank 0 and 2 on rank 1"),
        ("damping", "DistBackendError", "damping"),
        ("no layer", "RuntimeError", "rank 1 could not build its optimizer"),
        ("lr", "RuntimeError", "rank 1 could not build its optimizer"),
    ],
)
def test_ranks_that_differ_are_told_at_construction(what: str, error: str, message: str) -> None:
    with launch(body_different, 2, what) as ranks:
        outcomes = ranks.outcomes(deadline=15)
    assert outcomes[0].error == error, outcomes[0]
    assert message in outcomes[0].message
    assert not outcomes[1].ok


def body_two_groups(rank: Rank) -> float:
    """Two disjoint groups of equal size, each its own data and model; and a subgroup while others do nothing."""
    rank.init("gloo")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank.rank // 2]
    model = DistributedDataParallel(Net(), process_group=mine)
    optimizer = SPDKFAC(model, **OPTIONS)
    for step in range(6):
        image, token, target = (p.chunk(2)[rank.rank % 2] for p in whole_batch(step + 100 * (rank.rank // 2)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, token), target).backward()
        optimizer.step()
    other = [torch.empty_like(flat(model.module)) for _ in range(2)]
    dist.all_gather(other, flat(model.module), group=mine)
    assert torch.equal(other[0], other[1])
    return float(flat(model.module).sum())


def test_two_groups_of_equal_size_do_not_mix() -> None:
    sums = run_ranks(body_two_groups, 4)
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    assert not math.isclose(sums[0], sums[2], rel_tol=1e-9)


def body_refused_state(rank: Rank) -> str:
    rank.init("gloo")
    model = nn.Linear(3, 3)
    optimizer = KFAC(model)
    other = KFAC(nn.Linear(3, 2)).state_dict()
    try:
        optimizer.load_state_dict(other)
    except KFACStateError as error:
        return str(error)
    return ""


def test_a_state_of_another_model_is_refused_on_all_ranks() -> None:
    assert all("another model" in message for message in run_ranks(body_refused_state, 2))
