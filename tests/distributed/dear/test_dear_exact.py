"""Training by "dear" is single-process training on the whole batch: models, optimizers, world sizes, element types."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from largest import largest
from sharded import (
    EXACT,
    FORMS,
    PLAIN,
    SIZES,
    SIZES_AND_DTYPES,
    SIZES_WITH_EMPTY_PARTS,
    WAYS,
    Branches,
    Pair,
    Residual,
    Shuffled,
    Transformer,
    adagrad,
    adamw,
    adamw_or_sgd,
    check_within,
    each_in_ways,
    in_forms,
    made,
    mlp,
    sgd,
)
from test_dear_known_faults import check_beside_a_fault, in_forms_and_at_fault, late
from torch import nn

pytestmark = pytest.mark.sanitize

OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "adagrad": adagrad}


def body_models(rank: Rank) -> dict[str, float]:
    worst: dict[str, float] = {}
    for name, optimizer in OPTIMIZERS.items():
        for kind in (Residual, Transformer, Shuffled):
            worst[f"{kind.__name__} {name}"] = Pair(rank, made(kind), optimizer).run(6).done()
        pair = Pair(rank, made(Branches), optimizer, find_unused_parameters=True)
        worst[f"Branches {name}"] = pair.run(6).done()
    return worst


SOME_WAYS, OTHER_WAYS = WAYS[::3], WAYS[1:3]  # of each one of the forms, and one over collectives


@pytest.mark.parametrize(
    ("size", "ways"),
    [
        *((2, OTHER_WAYS), (3, SOME_WAYS)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, SOME_WAYS), (3, OTHER_WAYS), (4, WAYS))),
    ],
)
def test_models_and_optimizers(size: int, ways: list[str]) -> None:
    for worst in run_ranks(each_in_ways, size, [body_models], ways, deadline=120):
        check_within(worst)


# Damped: to steps of their own size both would make what is but rounding, in 8 bits most of many gradients.
OPTIMIZERS_OF_8_BITS: dict[str, Any] = {
    "sgd": sgd,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=0.03),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02, initial_accumulator_value=0.1),
}


def body_bfloat16(rank: Rank, first: int) -> dict[str, tuple[float, float]]:
    """How far from the twin dear ends, and how far plain DDP does; the optimizers are in one form and the other."""
    rank.init("dear")
    kinds: Any = (Residual, Transformer, mlp, Shuffled, Branches)
    away = {}
    for place, (name, optimizer) in enumerate(OPTIMIZERS_OF_8_BITS.items(), first):
        for kind in kinds:
            options = {"find_unused_parameters": kind is Branches}
            ends = [
                Pair(rank, made(kind, torch.bfloat16), optimizer, form=form, **options).run(12).done()
                for form in (FORMS[place % 2], PLAIN)
            ]
            away[f"{kind.__name__} {name}, {FORMS[place % 2]}"] = (ends[0], ends[1])
    return away


def check_beside_ddp(away: dict[str, tuple[float, float]]) -> None:
    # 12 steps, each rounded to 8 bits: the order of additions shows, as it does with plain DDP.
    assert all(dear <= max(3 * ddp, 0.03) for dear, ddp in away.values()), str(away)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", SIZES)
def test_bfloat16(size: int, first: int) -> None:
    for away in run_ranks(body_bfloat16, size, first, deadline=120):
        check_beside_ddp(away)


class Weights(nn.Module):
    """Whose gradient is its input; one tensor is exchanged directly, one in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = (nn.Parameter(torch.ones(count)) for count in (5, 100_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.few * x).float().sum() + (self.many * x).float().sum()


def body_float16(rank: Rank) -> list[tuple[float, float]]:
    pair = Pair(rank, made(Weights, torch.float16), sgd)
    pair.ddp(torch.tensor(40_000.0, dtype=torch.float16)).backward()
    gradients = [parameter.grad for parameter in pair.optimizer.param_groups[0]["params"]]
    return [(float(gradient.min()), float(gradient.max())) for gradient in gradients]


def test_float16_means_whose_sums_would_be_infinite() -> None:
    for found in run_ranks(each_in_ways, 3, [body_float16], WAYS):
        assert len(found) == len(WAYS)
        assert all(ranges == [(40_000.0, 40_000.0)] * 2 for ranges in found.values()), found


def body_all_optimizers(rank: Rank) -> dict[str, float]:
    optim = torch.optim
    makers: dict[str, Any] = {
        "Adam amsgrad": lambda p: optim.Adam(p, amsgrad=True),
        "Adam foreach": lambda p: optim.Adam(p, foreach=True),
        "Adam fused": lambda p: optim.Adam(p, fused=True),
        "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
        "Adadelta": optim.Adadelta,
        "Adamax": optim.Adamax,
        "NAdam": optim.NAdam,
        "RAdam": optim.RAdam,
        "ASGD": optim.ASGD,
        "Rprop": lambda p: optim.Rprop(p, lr=1e-4),
        "SGD nesterov maximize": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True, maximize=True),
    }
    return {name: Pair(rank, made(mlp), maker).run(6).done() for name, maker in makers.items()}


@pytest.mark.parametrize("size", SIZES_WITH_EMPTY_PARTS)
def test_all_elementwise_optimizers(size: int) -> None:
    for worst in run_ranks(in_forms, size, body_all_optimizers, deadline=90):
        check_optimizers(worst)


def check_optimizers(worst: dict[str, float]) -> None:
    for name, figure in worst.items():
        # Rprop decides by signs: a gradient that is zero but for rounding may go either way.
        assert figure < (1e-3 if "Rprop" in name else EXACT), (name, figure)


def body_ddp_options(rank: Rank) -> dict[str, float]:
    worst = {}
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.001}):
        worst[str(options)] = Pair(rank, made(Transformer), adamw, **options).run(6).done()
    channels_last = made(Residual).to(memory_format=torch.channels_last)
    worst["channels_last"] = Pair(rank, channels_last, adamw).run(6).done()
    mixed = made(mlp)
    mixed[2].double()
    mixed.register_forward_pre_hook(lambda *_: None)
    mixed[2].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    mixed[2].register_forward_hook(lambda _, __, output: output.float())
    worst["two dtypes"] = Pair(rank, mixed, adamw).run(6).done()
    for bucket_mb in (0.0011, 0.01, 4096):
        worst[f"{bucket_mb} MiB"] = Pair(rank, made(Transformer), adamw, bucket_mb=bucket_mb).run(6).done()
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_options_of_ddp_layouts_and_bucket_sizes(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, [body_ddp_options], WAYS, deadline=120):
        check_within(worst)


def body_plans(rank: Rank) -> float:
    """Through the trial of all-reduce, those of the tuner, and what it decides: the same on all ranks."""
    pair = Pair(rank, made(Transformer), adamw_or_sgd, bucket_mb="auto", fallback=True)
    tuned = Pair.form != PLAIN
    stats: dict[str, Any] = {}
    modes = set()
    worst = 0.0
    last = 400 if tuned else 100
    while pair.steps < last:
        pair.step()
        stats = pair.sync.stats()
        modes.add(stats["mode"])
        if tuned and stats["decided"] and last == 400:
            last = pair.steps + 10
        if pair.dtype == torch.bfloat16 and pair.steps % 5 == 0:
            # Rounding adds up over hundreds of steps: what five of them do is looked at.
            worst = largest(worst, pair.difference())
            pair.twin.load_state_dict(pair.module.state_dict())
        elif pair.dtype == torch.float32 and pair.steps in (13, 14, 15, 60):
            worst = largest(worst, pair.difference())
    if tuned:
        assert last < 400, stats
        assert rank.rank > 0 or 1 <= len(stats["tuner"]) <= 12
        # One rank alone has no all-reduce to try.
        assert modes == ({"dear", "allreduce"} if rank.size > 1 else {"dear"})
        decisions: list[Any] = [None] * rank.size
        dist.all_gather_object(decisions, (pair.steps, stats["mode"], stats["bucket_mb"]))
        assert len(set(decisions)) == 1, decisions
    return largest(worst, pair.done())


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_exact_while_plans_change(size: int, dtype: str) -> None:
    for found in run_ranks(in_forms_and_at_fault, size, dtype, body_plans, late, deadline=120):
        check_beside_a_fault(found, dtype)


def test_exact_while_plans_change_over_collectives() -> None:
    for worst in run_ranks(each_in_ways, 2, [body_plans], WAYS[2:], deadline=120):
        check_within(worst)


class Normalized(torch.optim.Optimizer):
    """Needs whole gradients, and counts in its groups, as optimizers do that torchext does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    size = parameter.norm() / (parameter.grad.norm() + 1e-3)
                    parameter.sub_(parameter.grad * size, alpha=group["lr"] / group["count"] ** 0.5)


def body_whole_gradients(rank: Rank) -> dict[str, float]:
    makers: dict[str, Any] = {"Normalized": Normalized, "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2)}
    if hasattr(torch.optim, "Muon"):
        makers["Muon"] = lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2)
    worst = {}
    for name, maker in makers.items():
        model = made(mlp)
        if name == "Muon":
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.dim() == 2)
        pair = Pair(rank, model, maker).run(10)
        pair.sync.wait()
        assert "count" not in pair.optimizer.param_groups[0] or pair.optimizer.param_groups[0]["count"] == 10
        worst[name] = pair.done()
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_optimizers_that_need_whole_gradients(size: int) -> None:
    for worst in run_ranks(each_in_ways, size, [body_whole_gradients], ["replicated"]):
        check_whole_gradients(worst)


def check_whole_gradients(worst: dict[str, float]) -> None:
    # Muon's iteration runs in bfloat16, where a difference in the last bit grows.
    for name, figure in worst.items():
        assert figure < (1e-2 if "Muon" in name else EXACT), (name, figure)


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 30_001), torch.nn.Linear(30_001, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def body_segments(rank: Rank) -> float:
    sgd_plain = functools.partial(torch.optim.SGD, lr=0.01)
    return largest(Pair(rank, made(Wide), sgd_plain, bucket_mb=size).run(4).done() for size in (0.001, 2, 64))


@pytest.mark.parametrize("size", SIZES_WITH_EMPTY_PARTS)
def test_buckets_of_many_segments(size: int) -> None:
    for worst in run_ranks(in_forms, size, body_segments):
        check_within(worst)
