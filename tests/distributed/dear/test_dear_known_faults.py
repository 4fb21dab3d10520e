"""The known faults of the authors' optimizer: "dear" is single-process training on the whole batch where that is not.

Each case is trained by "dear" in both forms, and once more with its fault put into the twin: the bound that "dear" is
held to must be one that the fault exceeds. In bfloat16 the order of additions shows; the bound is what DDP's comes to.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Rank, run_ranks
from largest import largest
from sharded import (
    EXACT,
    FORMS,
    PLAIN,
    SIZES_AND_DTYPES,
    Branches,
    Pair,
    Shuffled,
    Transformer,
    adamw_or_sgd,
    batch,
    figures_of,
    made,
    mlp,
    sgd,
)
from torch import nn
from torch.nn.functional import cross_entropy, linear


def in_forms_and_at_fault(
    rank: Rank, dtype: str, body: Callable[..., Any], fault: Callable[[Pair], Any], *args: Any
) -> dict[str, dict[str, float]]:
    """As in_forms, of this element type; then by DDP alone, and by DDP beside a twin with a fault."""
    rank.init("dear")
    return beside_a_fault(rank, dtype, body, fault, *args)


def beside_a_fault(
    rank: Rank, dtype: str, body: Callable[..., Any], fault: Callable[[Pair], Any], *args: Any
) -> dict[str, dict[str, float]]:
    """That, where the ranks are joined."""
    Pair.dtype = getattr(torch, dtype)
    forms = FORMS if dtype == "float32" else [*FORMS, PLAIN]  # where DDP's rounding counts
    found = {form: figures_of(form, body, rank, *args) for form in forms}
    Pair.fault = fault
    try:
        return {**found, "fault": figures_of(PLAIN, body, rank, *args)}
    finally:
        Pair.fault = None


def check_beside_a_fault(found: dict[str, dict[str, float]], dtype: str) -> None:
    """Of what in_forms_and_at_fault returns: the forms are within a bound, which the fault is clearly outside of.

    In bfloat16 the order of additions shows: twice what it does to DDP alone, or two spacings of the largest values.
    """
    for name, at_fault in found["fault"].items():
        bound = EXACT if dtype == "float32" else max(2 * found[PLAIN][name], 2 * torch.finfo(torch.bfloat16).eps)
        figures = f"{name}: { ({key: values[name] for key, values in found.items()}) }"
        assert all(found[form][name] < bound for form in FORMS), f"{figures}, the bound is {bound}"
        assert at_fault > 1.5 * bound, f"the fault would not be noticed: {figures}, the bound is {bound}"


def late(pair: Pair) -> Callable[[], None]:
    """Steps in the next forward pass that is trained: what is looked at before is old. Returns what does it."""
    step, parameters = pair.plain.step, list(pair.twin.parameters())
    held: list[list[torch.Tensor | None]] = []

    def keep(*_: Any) -> None:
        held.append([parameter.grad for parameter in parameters])

    def catch_up() -> None:
        now = [parameter.grad for parameter in parameters]
        while held:
            for parameter, gradient in zip(parameters, held.pop(0), strict=True):
                parameter.grad = gradient
            step()
        for parameter, gradient in zip(parameters, now, strict=True):
            parameter.grad = gradient

    pair.plain.step = types.MethodType(keep, pair.plain)
    pair.twin.register_forward_pre_hook(lambda *_: catch_up() if torch.is_grad_enabled() else None)
    return catch_up


def body_accumulation(rank: Rank) -> dict[str, float]:
    found = {}
    for no_sync in (True, False):  # without no_sync every micro-batch is exchanged, which must not count twice
        pair = Pair(rank, made(mlp), adamw_or_sgd)
        for step in range(6):
            pair.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3):
                if no_sync and micro < 2:
                    with pair.ddp.no_sync():
                        own, whole = pair.losses(3 * step + micro)
                        own.backward()
                else:
                    own, whole = pair.losses(3 * step + micro)
                    own.backward()
                whole.backward()
            pair.update()
        found["in no_sync" if no_sync else "exchanged each time"] = pair.done()
    return found


def last_batch_alone(pair: Pair) -> None:
    for parameter in pair.twin.parameters():
        parameter.register_hook(lambda _, parameter=parameter: setattr(parameter, "grad", None))


def body_groups(rank: Rank) -> float:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = [{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    return Pair(rank, made(mlp), two_groups).run(10).done()


def one_group(pair: Pair) -> None:
    first, second = pair.plain.param_groups
    second |= {key: value for key, value in first.items() if key != "params"}


def body_schedules(rank: Rank) -> float:
    pair = Pair(rank, made(mlp), steep)
    schedules: list[torch.optim.lr_scheduler.LRScheduler] = []
    for optimizer in (pair.optimizer, pair.plain):
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.1)[step % 2]))
        schedules.append(torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4))
    for _ in range(10):
        pair.step()
        for schedule in schedules:
            schedule.step()
    assert pair.optimizer.param_groups[0]["lr"] == pair.plain.param_groups[0]["lr"]
    return pair.done()


def next_lr(pair: Pair) -> None:
    catch_up, apart = late(pair), pair.difference

    def difference() -> float:
        catch_up()
        return apart()

    pair.difference = difference


def steep(parameters: Any) -> torch.optim.Optimizer:
    """Its steps are large beside the rounding of parameters to 8 bits."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def body_shuffled(rank: Rank) -> float:
    return Pair(rank, made(Shuffled), steep).run(8).done()


def old_values(pair: Pair) -> None:
    """Layers compute with what was there before the last step."""
    for layer in pair.twin.layers:
        kept = [layer.weight.detach().clone()]
        pair.plain.register_step_pre_hook(lambda *_, layer=layer, kept=kept: kept.append(layer.weight.detach().clone()))
        layer.forward = lambda x, layer=layer, kept=kept: linear(
            x, layer.weight + (kept[-1] - layer.weight).detach(), layer.bias
        )


def body_unused(rank: Rank) -> float:
    return Pair(rank, made(Branches), sgd, find_unused_parameters=True).run(12).done()


def body_branch_by_rank(rank: Rank, optimizer: Any = adamw_or_sgd, steps: int = 6, **options: Any) -> float:
    """Ranks use different branches: a parameter that some do not use has the others' gradient."""
    pair = Pair(rank, made(Branches), optimizer, find_unused_parameters=True, **options)
    for _ in range(steps):
        pair.zero_grad()
        pair.module.choice = rank.rank
        pair.losses()[0].backward()
        inputs, targets = batch(pair.steps, rank.size)
        for part in range(rank.size):
            pair.twin.choice = part
            rows = slice(part, None, rank.size)
            (cross_entropy(pair.twin(inputs[rows]).float(), targets[rows]) / rank.size).backward()
        pair.update()
    assert pair.module.never.weight.grad is None or not pair.module.never.weight.grad.any()
    return pair.done()


def old_gradient(pair: Pair) -> None:
    """What has no gradient is stepped with what the memory holds."""

    def fill(*_: Any) -> None:
        for parameter in pair.twin.parameters():
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, 0.1)

    pair.plain.register_step_pre_hook(fill)


def body_clipping(rank: Rank) -> dict[str, float]:
    found = {}
    for norm_type, fallback in ((2.0, False), (1.0, False), (float("inf"), False), (2.0, True)):
        pair = Pair(rank, made(mlp), sgd, fallback=fallback)
        norms = 0.0
        for _ in range(4):
            pair.zero_grad()
            pair.backward(10)
            norms = largest(norms, pair.clip(0.5, norm_type))
            pair.update()
        where = f"norm {norm_type:g}{', all-reduce' if fallback else ''}"
        found |= {where: pair.done(), f"{where}, its value": norms}
    return found


def unclipped(pair: Pair) -> None:
    clip_twin = pair.clip_twin
    pair.clip_twin = lambda _, norm_type: clip_twin(float("inf"), norm_type)


def body_adam(rank: Rank) -> float:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        # With the usual eps a gradient that is but rounding moves a parameter as far as any.
        return torch.optim.Adam(parameters, lr=0.05, eps=0.01)

    return Pair(rank, made(mlp), adam).run(6).done()


def body_set_to_none(rank: Rank) -> dict[str, float]:
    found = {}
    for to_none in (True, False):
        pair = Pair(rank, made(mlp), sgd)
        for _ in range(6):
            pair.zero_grad(set_to_none=to_none)
            pair.backward()
            pair.update()
        found[f"set_to_none={to_none}"] = pair.done()
    return found


def not_cleared(pair: Pair) -> None:
    pair.plain.zero_grad = lambda set_to_none=True: None


def body_scaler(rank: Rank) -> float:
    pair = Pair(rank, made(mlp), sgd)
    scales = pair.run_scaled(lambda: pair.clip(0.3))
    assert scales[3] < scales[2] and scales[6] > scales[3] > 0  # it went down, and up
    return pair.done()


def one_step_less(pair: Pair) -> None:
    step = pair.plain.step
    pair.plain.step = types.MethodType(lambda _: None if pair.steps == 5 else step(), pair.plain)


def body_autocast(rank: Rank) -> float:
    pair = Pair(rank, made(mlp, torch.float32), steep)
    for _ in range(6):
        pair.zero_grad()
        with torch.autocast("cpu", Pair.dtype, enabled=Pair.dtype != torch.float32):
            losses = pair.losses()
        for loss in losses:
            loss.backward()
        pair.update()
    return pair.done()


def body_freezing(rank: Rank) -> float:
    pair = Pair(rank, made(mlp), adamw_or_sgd, find_unused_parameters=True)
    for step in range(9):
        for module in (pair.module, pair.twin):
            module[2].requires_grad_(not 3 <= step < 6)
        pair.step()
    return pair.done()


def not_frozen(pair: Pair) -> None:
    pair.twin[2].requires_grad_ = lambda _: None


def shared() -> nn.Module:
    """A module in two places."""
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(16, 4))


def body_shared(rank: Rank) -> dict[str, float]:
    return {kind.__name__: Pair(rank, made(kind), steep).run(5).done() for kind in (Transformer, shared)}


def counted_twice(pair: Pair) -> None:
    weight = pair.twin.embed.weight if hasattr(pair.twin, "embed") else pair.twin[0].weight
    weight.register_hook(lambda gradient: 2 * gradient)


CASES: dict[str, tuple[Callable[[Rank], Any], Callable[[Pair], Any]]] = {
    "accumulation": (body_accumulation, last_batch_alone),
    "groups": (body_groups, one_group),
    "schedules": (body_schedules, next_lr),
    "order": (body_shuffled, old_values),
    "unused": (body_unused, old_gradient),
    "branches": (body_branch_by_rank, old_gradient),
    "clipping": (body_clipping, unclipped),
    "adam": (body_adam, late),
    "set_to_none": (body_set_to_none, not_cleared),
    "scaler": (body_scaler, one_step_less),
    "autocast": (body_autocast, late),
    "freezing": (body_freezing, not_frozen),
    "shared": (body_shared, counted_twice),
}


def body_known_faults(rank: Rank, dtype: str) -> dict[str, dict[str, dict[str, float]]]:
    rank.init("dear")
    return {case: beside_a_fault(rank, dtype, *CASES[case]) for case in CASES}


def check_known_faults(cases: dict[str, dict[str, dict[str, float]]], dtype: str) -> None:
    assert cases.keys() == CASES.keys()
    for case, found in cases.items():
        try:
            check_beside_a_fault(found, dtype)
        except AssertionError as error:
            error.add_note(f"of the case {case!r}")
            raise


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_known_faults(size: int, dtype: str) -> None:
    for cases in run_ranks(body_known_faults, size, dtype, deadline=180):
        check_known_faults(cases, dtype)
