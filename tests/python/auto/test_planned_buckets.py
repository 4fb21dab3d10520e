"""A plan's buckets as places and ends for dear, and as limits for DDP; whose model it is; long steps are said once."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from auto_examples import growing_profile
from torch import nn

from torchext.auto import Candidate, ParameterProfile, Profile
from torchext.auto.planned_buckets import bucket_limits, check_profiled, dear_plan, reduced_names
from torchext.auto.step_watch import StepWatch, watch_of


class Two(nn.Module):
    """Layers of two element types, one that gets no gradient, and one that is frozen."""

    def __init__(self, other: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3)  # 6 and 3 elements
        self.b = nn.Linear(3, 4, dtype=other)  # 12, 4
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.unused = nn.Linear(5, 1)  # 5, 1
        self.c = nn.Linear(4, 2)  # 8, 2


def profile_of(model: nn.Module, order: list[str], first_uses: list[int] | None = None) -> Profile:
    named = dict(model.named_parameters())
    return dataclasses.replace(
        growing_profile(),
        parameters=tuple(
            ParameterProfile(
                name=name,
                shape=tuple(named[name].shape),
                dtype=str(named[name].dtype),
                nbytes=named[name].nbytes,
                ready_seconds=float(place),
                first_use=first_uses[place] if first_uses else len(order) - place,
            )
            for place, name in enumerate(order)
        ),
        without_gradient=("unused.weight", "unused.bias"),
    )


def with_buckets(*buckets: tuple[int, ...]) -> Any:
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Candidate))
    return Candidate(**fields | {"buckets": buckets})


ORDER = ["c.bias", "c.weight", "b.bias", "b.weight", "a.bias", "a.weight"]


def named_in(model: nn.Module, names: list[str], places: list[int]) -> list[str]:
    assert all(name in dict(model.named_parameters()) for name in names)
    return [names[place] for place in places]


def test_places_and_ends() -> None:
    model = Two()
    names = [name for name, _ in model.named_parameters()]
    profile = profile_of(model, ORDER)
    # Float32: c.bias alone, the rest of c with all of a; float64: b. Its bucket leaves before that of a.
    plan = dear_plan(profile, with_buckets((0,), (2, 3), (1, 4, 5)), model, names)
    assert named_in(model, names, plan.gradient_order) == [*ORDER, "unused.weight", "unused.bias"]
    assert plan.ends == [1, 4, 6, 8]
    assert named_in(model, names, plan.forward_order)[:6] == ORDER[::-1]
    assert sorted(plan.forward_order) == sorted(plan.gradient_order)


def test_what_ddp_ignores_is_in_no_bucket() -> None:
    model = Two()
    model._ddp_params_and_buffers_to_ignore = ["c.bias", "b.weight"]  # type: ignore[assignment]
    names = [name for name, _ in model.named_parameters() if name not in ("c.bias", "b.weight")]
    assert reduced_names(model) == [name for name in names if not name.startswith("frozen")]
    plan = dear_plan(profile_of(model, ORDER), with_buckets((0,), (2, 3), (1, 4, 5)), model, names)
    kept = ["c.weight", "b.bias", "a.bias", "a.weight"]
    assert named_in(model, names, plan.gradient_order)[:4] == kept
    assert plan.ends == [2, 4, 6]


def test_forward_order_is_that_of_first_uses() -> None:
    model = Two()
    names = [name for name, _ in model.named_parameters()]
    plan = dear_plan(profile_of(model, ORDER, [1, 1, 3, 3, 2, 2]), with_buckets((0, 1, 2, 3, 4, 5)), model, names)
    assert [name[0] for name in named_in(model, names, plan.forward_order)] == [*"ccaabb", *"uu"]


def test_limits() -> None:
    model = Two(torch.float32)
    profile = profile_of(model, ORDER)
    candidate = with_buckets((0,), (1, 2), (3, 4, 5))
    assert bucket_limits(profile, candidate, model, registered=False) == [4 * 2, 4 * (8 + 4), 4 * (12 + 9)]
    # In the order of registration; unused goes with what is in front of it.
    assert bucket_limits(profile, candidate, model, registered=True) == [4 * (9 + 12), 4 * (4 + 6 + 8), 4 * 2]
    # Where registration is no mirror of the gradients' order a bucket is cut in two.
    mixed = with_buckets((0, 2), (1, 3, 4, 5))
    assert bucket_limits(profile, mixed, model, registered=True) == [4 * 21, 4 * (4 + 6), 4 * 8, 4 * 2]
    assert bucket_limits(profile_of(Two(), ORDER), candidate, Two(), registered=False) is None


def test_another_model_is_refused() -> None:
    profile = profile_of(Two(), ORDER)
    check_profiled("x", profile, Two())
    with pytest.raises(ValueError, match=r"'b.bias' is torch.float64 there and torch.float32 here"):
        check_profiled("x", profile, Two(torch.float32))
    frozen = Two()
    frozen.c.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'c.bias' has shape \(2,\) there and none here"):
        check_profiled("x", profile, frozen)
    more = Two()
    more.d = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"it lacks 'd.weight', which the model trains"):
        check_profiled("x", profile, more)


class Synchronizer:
    """What a watch belongs to."""


@pytest.mark.parametrize("speaks", [True, False])
def test_long_steps_are_said_once(
    speaks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    synchronizer: Any = Synchronizer()
    watch = StepWatch(synchronizer, optimizer, 0.1, speaks=speaks)
    assert watch_of(synchronizer) is watch

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            now[0] += seconds
            optimizer.step()

    with caplog.at_level(logging.WARNING, "torchext"):
        steps(101, 1.0)  # not looked at
        steps(26, 0.12)
        steps(24, 9.0)  # pauses
        assert not caplog.records
        assert watch.last(3) == pytest.approx([9.0] * 3)
        steps(150, 0.13)
    assert len(caplog.records) == speaks
    if speaks:
        assert "a step takes 130 ms (median of 50), and the plan predicted 100 ms" in caplog.text
    del synchronizer, watch
    steps(1, 1.0)
    assert not optimizer._optimizer_step_post_hooks
