"""Training by "dear" is single-process training on the whole batch: models, optimizers, world sizes, element types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from sharded import Branches, Pair, Residual, Shuffled, Transformer, adagrad, adamw, made, mlp, sgd

SIZES = [1, 2, 3, 4]
OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "adagrad": adagrad}


def body_models(rank: Rank) -> dict[str, float]:
    rank.init("dear")
    worst: dict[str, float] = {}
    for name, optimizer in OPTIMIZERS.items():
        for kind in (Residual, Transformer, Shuffled):
            worst[f"{kind.__name__} {name}"] = Pair(rank, made(kind), optimizer).run(20).done()
        pair = Pair(rank, made(Branches), optimizer, find_unused_parameters=True)
        worst[f"Branches {name}"] = pair.run(20).done()
    return worst


@pytest.mark.parametrize("size", SIZES)
def test_models_and_optimizers(size: int) -> None:
    for worst in run_ranks(body_models, size, deadline=120):
        assert max(worst.values()) < 1e-5, str(worst)


def body_bfloat16(rank: Rank) -> dict[str, tuple[float, float]]:
    """How far from the twin dear ends, and how far plain DDP does."""
    rank.init("dear")
    kinds: Any = (Residual, Transformer, mlp)
    away = {}
    for kind in kinds:
        pair = Pair(rank, made(kind, torch.bfloat16), sgd)
        plain = Pair(rank, made(kind, torch.bfloat16), sgd)
        plain.sync.detach()
        away[kind.__name__] = (pair.run(20).done(), plain.run(20).done())
    return away


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16(size: int) -> None:
    # 20 steps, each rounded to 8 bits: the order of additions shows, as it does with plain DDP.
    for away in run_ranks(body_bfloat16, size, deadline=90):
        assert all(dear <= max(2 * ddp, 0.02) for dear, ddp in away.values()), str(away)


def body_all_optimizers(rank: Rank) -> dict[str, float]:
    rank.init("dear")
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
    return {name: Pair(rank, made(mlp), maker).run(8).done() for name, maker in makers.items()}


def test_all_elementwise_optimizers() -> None:
    for worst in run_ranks(body_all_optimizers, 3, deadline=90):
        # Rprop decides by signs: a gradient that is zero but for rounding may go either way.
        assert max(value for name, value in worst.items() if name != "Rprop") < 1e-5, str(worst)
        assert worst["Rprop"] < 1e-3, str(worst)


def body_ddp_options(rank: Rank) -> dict[str, float]:
    rank.init("dear")
    worst = {}
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.001}):
        worst[str(options)] = Pair(rank, made(Transformer), adamw, **options).run(8).done()
    channels_last = made(Residual).to(memory_format=torch.channels_last)
    worst["channels_last"] = Pair(rank, channels_last, adamw).run(8).done()
    mixed = made(mlp)
    mixed[2].double()
    mixed.register_forward_pre_hook(lambda *_: None)
    mixed[2].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    mixed[2].register_forward_hook(lambda _, __, output: output.float())
    worst["two dtypes"] = Pair(rank, mixed, adamw).run(8).done()
    for bucket_mb in (0.0011, 0.01, 4096):
        worst[f"{bucket_mb} MiB"] = Pair(rank, made(Transformer), adamw, bucket_mb=bucket_mb).run(8).done()
    return worst


def test_options_of_ddp_layouts_and_bucket_sizes() -> None:
    for worst in run_ranks(body_ddp_options, 3, deadline=90):
        assert max(worst.values()) < 1e-5, str(worst)


def body_plans(rank: Rank) -> tuple[float, dict[str, Any]]:
    """Through the trial of all-reduce, those of the tuner, and what it decides."""
    rank.init("dear")
    pair = Pair(rank, made(Transformer), adamw, bucket_mb="auto", fallback=True)
    modes = set()
    worst = 0.0
    for _ in range(170):
        pair.step()
        modes.add(pair.sync.stats()["mode"])
        if pair.steps in (13, 14, 15, 60, 170):
            worst = max(worst, pair.difference())
    assert modes == {"dear", "allreduce"}
    stats = pair.sync.stats()
    assert stats["decided"]
    return max(worst, pair.done()), stats


def test_exact_while_plans_change() -> None:
    results = run_ranks(body_plans, 2, deadline=90)
    assert max(worst for worst, _ in results) < 2e-5
    assert len({(stats["mode"], stats["bucket_mb"]) for _, stats in results}) == 1
    assert 1 <= len(results[0][1]["tuner"]) <= 12
