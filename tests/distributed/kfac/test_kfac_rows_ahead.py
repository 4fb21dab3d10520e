"""Directions of rows that are written before step() asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from dense_net import ROW_OPTIONS, STEPS, Dense, backward, batch, steps
from harness import Rank, run_ranks
from rows import values_in_one_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC

Look = Callable[[Any, KFAC, int], Any]


def body_ahead(rank: Rank, look: Look, options: dict[str, Any], ddp: dict[str, Any]) -> dict[str, Any]:
    """Both ways; `look` at what is between backward() and step(), and afterwards at what that returned."""
    models = [DistributedDataParallel(Dense(), **ddp) for _ in range(2)]
    optimizers = [KFAC(m, gather_rows=r, **(ROW_OPTIONS | options)) for m, r in zip(models, (False, True), strict=True)]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            if look is not cleared or step == 0:
                optimizer.zero_grad()
            model(batch(step).chunk(rank.size)[rank.rank]).square().mean().backward()
            check = look(model.module, optimizer, step)
            optimizer.step()
            if check is not None:
                check()
    for model in models:
        equal_everywhere(model.module)
    torch.testing.assert_close(flat(models[0].module), flat(models[1].module), rtol=1e-9, atol=1e-12)
    return optimizers[1].stats()


def nothing(model: nn.Module, optimizer: KFAC, step: int) -> None:
    """Every step is as the one before."""


def other_rate(model: nn.Module, optimizer: KFAC, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


def other_factor(model: nn.Module, optimizer: KFAC, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01 / (1 + step))


def cleared(model: nn.Module, optimizer: KFAC, step: int) -> Callable[[], None]:
    """Gradients stay, as zeros, and the next ones are added to them."""
    return lambda: model.zero_grad(set_to_none=False)


def once_another(model: nn.Module, optimizer: KFAC, step: int) -> None:
    """What was foreseen of the steps to come turns out to be wrong in one of them."""
    optimizer.param_groups[0]["lr"] = 0.05 if step == 5 else 0.1


def watch(model: nn.Module, optimizer: KFAC, step: int) -> Callable[[], None]:
    """Whoever has hold of a gradient sees its direction; on every rank another kind of hold.

    Where it is nobody but .grad itself, a weight's direction comes with its memory.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    kind = dist.get_rank() if step > 3 else 3
    hold = (lambda g: g.numpy(), lambda g: g.detach(), lambda g: g[1:], lambda g: g)[kind]
    views: list[Any] = [hold(g) for g in gradients]
    places = [g.data_ptr() for g in gradients]
    before = optimizer.stats()["row_directions_ahead"]

    def check() -> None:
        ahead = optimizer.stats()["row_directions_ahead"] > before
        for p, gradient, view, place in zip(model.parameters(), gradients, views, places, strict=True):
            assert p.grad is gradient
            assert (gradient.data_ptr() != place) == (ahead and kind == 3 and p.dim() == 2)
            assert torch.equal(torch.as_tensor(view), gradient[1:] if kind == 2 else gradient)

    return check


# Steps 1, 2, 4, 5 and 7 are of rows, 1 and 2 are what the next ones are foreseen by; three layers.
AHEAD: list[tuple[Look, dict[str, Any], dict[str, Any], int]] = [
    (nothing, {}, {}, 9),
    (nothing, {"kl_clip": 1e-9}, {}, 9),
    (nothing, {"kl_clip": None}, {}, 9),
    (nothing, {"split_directions": True}, {}, 9),
    (nothing, {"shared_memory": True}, {}, 0),
    (other_rate, {"kl_clip": 1e-9}, {}, 0),
    (other_rate, {"kl_clip": None}, {}, 9),  # nothing depends on it
    (other_factor, {}, {}, 0),
    (once_another, {"kl_clip": 1e-9}, {}, 3),
    (cleared, {}, {}, 9),
    (nothing, {}, {"gradient_as_bucket_view": True}, 9),
    (watch, {}, {}, 9),
]


def test_directions_are_written_ahead_where_their_factor_is_foreseen() -> None:
    cases = {f"{look.__name__} {options} {ddp}": (look, options, ddp, ahead) for look, options, ddp, ahead in AHEAD}
    found = values_in_one_group({name: (body_ahead, *case[:3]) for name, case in cases.items()}, 4)
    for name, (*_, ahead) in cases.items():
        for stats in found[name]:
            assert (stats["row_directions"], stats["row_directions_ahead"]) == (15, ahead), name


def body_kept(rank: Rank) -> bool:
    """Gradients of earlier steps stay what they were, whatever memory directions of later ones are written to."""
    model, optimizer = steps(rank, 3)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(3, 12):
        backward(model, optimizer, step, rank)
        optimizer.step()
        kept += [(p.grad, p.grad.clone()) for p in model.parameters()]
    assert optimizer.stats()["row_directions_ahead"] == 18
    return all(torch.equal(gradient, as_it_was) for gradient, as_it_was in kept)


def test_gradients_of_earlier_steps_are_left_alone() -> None:
    assert run_ranks(body_kept, 2) == [True, True]
