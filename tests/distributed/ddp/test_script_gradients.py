"""Gradients and state that a script changes, takes away, keeps over a step or looks at."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import ATTACHED, DEAR, Script, apart, check_apart, check_rows_apart, loss, momentum, wide
from harness import Rank, elapsed_error, run_ranks
from rows import row_values
from torch import nn

# ---- Changed ----


def train(script: Script, change: Callable[[Script, torch.optim.Optimizer], None], when: str) -> torch.Tensor:
    script.wrap(wide())
    optimizer = momentum(script.ddp.parameters())
    script.attach(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss(script).backward()
        if when == "before" and step % 2:
            change(script, optimizer)
        optimizer.step()
        if when == "after" and step % 2:
            change(script, optimizer)
    return script.result()


def clip_norm(script: Script, _: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(script.ddp.parameters(), 0.01)


def clip_value(script: Script, _: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(script.ddp.parameters(), 1e-4)


def scale(script: Script, _: torch.optim.Optimizer) -> None:
    for parameter in script.ddp.parameters():
        parameter.grad *= 0.1


def decay(script: Script, _: torch.optim.Optimizer) -> None:
    for parameter in script.ddp.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)


def replace(script: Script, _: torch.optim.Optimizer) -> None:
    for parameter in script.ddp.parameters():
        parameter.grad = parameter.grad.clone().sign() * 1e-3


def drop(script: Script, _: torch.optim.Optimizer) -> None:
    next(script.ddp.parameters()).grad = None


def zero(script: Script, _: torch.optim.Optimizer) -> None:
    script.ddp.module[2].weight.grad.zero_()


def sort(script: Script, _: torch.optim.Optimizer) -> None:
    """By something that wants whole gradients."""
    for parameter in script.ddp.parameters():
        parameter.grad.mul_((parameter.grad.abs() > parameter.grad.abs().median()).float())


def forget_momentum(_: Script, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


def clear_state(_: Script, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def replace_state(_: Script, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = collections.defaultdict(dict)


BEFORE = [clip_norm, clip_value, scale, decay, replace, drop, zero, sort]
AFTER = [forget_momentum, clear_state, replace_state]


def check_changes(changes: list[Callable[..., None]], when: str) -> None:
    rows = itertools.product(DEAR, changes)
    check_rows_apart({f"{form}, {change.__name__}": (form, train, change, when) for form, change in rows})


def test_gradients_changed_before_the_step() -> None:
    check_changes(BEFORE, "before")


def test_state_changed_after_the_step() -> None:
    check_changes(AFTER, "after")


def state_in_order(script: Script) -> torch.Tensor:
    """The state has the order of the parameters, whichever were stepped first."""
    script.wrap(wide())
    optimizer = momentum(script.ddp.parameters())
    script.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss(script).backward()
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    assert list(saved) == sorted(saved)
    script.result()
    return torch.cat([value["momentum_buffer"].flatten() for value in saved.values()])


def test_state_is_in_the_order_of_the_parameters() -> None:
    check_apart(DEAR, state_in_order)


# ---- Taken by a hook ----


def taken(script: Script) -> torch.Tensor:
    """Gradients are moved elsewhere as they come, averaged by the script, and put back."""
    model = script.wrap(wide())
    optimizer = momentum(model.parameters())
    script.attach(optimizer)
    found: dict[torch.Tensor, torch.Tensor] = {}

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        found[parameter] = parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    for _ in range(3):
        with model.no_sync():
            loss(script).backward()
        for parameter in model.parameters():
            dist.all_reduce(found[parameter], group=script.group)
            parameter.grad = found[parameter] / 2
        optimizer.step()
        optimizer.zero_grad()
    return script.result()


def test_gradients_that_a_hook_takes_away() -> None:
    check_apart(ATTACHED, taken)


# ---- Kept over a step ----

CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda _: None,
    "clipped values": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1e-3),
    "a clipped norm": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1e-3),
    "halves": lambda module: [parameter.grad.mul_(0.5) for parameter in module.parameters()],  # type: ignore[union-attr]
}


def kept(script: Script, change: str, zeroing: str) -> torch.Tensor:
    model = script.wrap(wide())
    optimizer = momentum(model.parameters())
    script.attach(optimizer)
    for _ in range(3):
        loss(script).backward()
        CHANGES[change](model.module)
        optimizer.step()
        if zeroing == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        elif zeroing == "model":
            model.zero_grad()
            with model.no_sync():
                loss(script).backward()
    return script.result()


def body_kept(rank: Rank, form: str, change: str, zeroing: str) -> Any:
    try:
        return apart(rank, form, kept, change, zeroing)
    except RuntimeError as error:
        return str(error)


def test_a_gradient_that_was_changed_and_is_added_to_after_the_step() -> None:
    """As with plain DDP; where this rank's own gradient does not have the change, refused with the way out."""
    table = itertools.product(DEAR, CHANGES, ["none", "optimizer", "model"])
    rows = {f"{form}, {change}, {zeroing}": (form, change, zeroing) for form, change, zeroing in table}
    for row, both in row_values(body_kept, 2, rows).items():
        form, change, zeroing = rows[row]
        for found in both:
            if form == "dear-sharded" and change != "nothing" and zeroing == "none":
                assert "was changed before the last step" in found and "zero_grad()" in found, (row, found)
            else:
                assert isinstance(found, float) and found < 1e-6, (row, found)


def body_kept_by_one(rank: Rank, without: bool) -> str:
    """Only rank 1 adds to a gradient that a change is missing of: that of rank 0 is zeros, or not there."""
    rank.init("gloo")
    script = Script(rank, "dear-sharded")
    model = script.wrap(wide(), find_unused_parameters=without)
    optimizer = momentum(model.parameters())
    script.attach(optimizer)
    try:
        for _ in range(3):
            (loss(script) * rank.rank).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            if without and rank.rank == 0:
                model.zero_grad()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_lost_change_on_one_rank_is_told_to_all() -> None:
    rows = {"zeros": (False,), "no gradient": (True,)}
    for row, both in row_values(body_kept_by_one, 2, rows, deadline=20).items():
        for found in both:
            assert "was changed before the last step" in found and "zero_grad()" in found, (row, found)


# ---- Looked at ----


def read_after_the_step(rank: Rank) -> bool:
    rank.init("gloo")
    script = Script(rank, "dear-sharded")
    script.wrap(wide())
    optimizer = momentum(script.ddp.parameters())
    script.attach(optimizer)
    for clear in (optimizer.zero_grad, script.ddp.zero_grad, lambda: script.ddp.zero_grad(set_to_none=False)):
        loss(script).backward()
        optimizer.step()
        gradient = script.ddp.module[2].weight.grad
        assert gradient is not None and gradient.shape == (400, 400)
        with pytest.raises(
            RuntimeError, match=r"slices, which are gone after .*form='replicated'.*zero_grad\(\) first"
        ):
            gradient.abs()
        clear()
        assert script.ddp.module[2].weight.grad is None or not script.ddp.module[2].weight.grad.any()
    return True


def test_a_gradient_that_a_step_has_used_up_is_not_read_in_the_sharded_form() -> None:
    assert run_ranks(read_after_the_step, 2) == [True, True]


def body_looks_alone(rank: Rank) -> str:
    rank.init("gloo")
    script = Script(rank, "dear-sharded")
    script.wrap(wide())
    script.attach(momentum(script.ddp.parameters()))
    loss(script).backward()
    if rank.rank == 1:
        dist.destroy_process_group(script.group)
        return ""
    return elapsed_error(lambda: script.ddp.module[0].weight.grad.norm())[1]


def test_a_rank_that_looks_at_a_gradient_alone_is_told_to_do_it_on_all() -> None:
    found, _ = run_ranks(body_looks_alone, 2)
    assert "do it on every rank, or take DeAROptions(form='replicated')" in found, found
