"""Directions made of the rows of all ranks' batches: every strategy is one process with the whole batch."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attached import equal_everywhere, flat
from harness import Rank, elapsed_error, launch, run_ranks
from kfac_net import OPTIONS, ROWS, Net, run_alone, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchext.optim import KFAC, KFACPreconditioner

STRATEGIES = ("spd", "pad", "comm-opt", "hybrid", "auto")
STEPS = 8  # of which 0, 3 and 6 make inverses


def body(rank: Rank, shared: bool, options: dict[str, Any]) -> dict[str, tuple[float, int]]:
    rank.init("gloo")
    expected = run_alone(rank, STEPS, "inverse")
    start = flat(Net())
    found = {}
    for strategy in STRATEGIES:
        model = DistributedDataParallel(Net())
        optimizer = KFAC(
            model,
            strategy=strategy,
            shared_memory=shared,
            gather_rows=True,
            **(OPTIONS | options),
        )
        train(model, optimizer, STEPS, rank=rank.rank, size=rank.size)
        equal_everywhere(model.module)
        error = (flat(model.module) - expected).abs().max() / (expected - start).abs().max()
        stats = optimizer.stats()
        assert stats["row_directions_refused"] == 0
        found[strategy] = (float(error), stats["row_directions"])
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"factor_update_steps": 1, "exchange_always": True}, {"split_directions": True}],
    ids=["", "always", "split"],
)
@pytest.mark.parametrize(("size", "shared"), [(1, True), (2, True), (2, False), (3, True), (3, False), (4, False)])
def test_every_strategy_is_one_process_with_the_whole_batch(size: int, shared: bool, options: dict[str, Any]) -> None:
    for found in run_ranks(body, size, shared, options):
        for strategy, (error, count) in found.items():
            assert error < 1e-9, found
            # Two Linear layers in five steps; under `hybrid` and what `auto` may choose some belong to few ranks.
            assert count == 10 or (strategy in ("hybrid", "auto") and size > 1), found


class Dense(nn.Module):
    """Linear layers only, one of which is called in some batches."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(10, 40)
        self.seldom = nn.Linear(40, 40)
        self.head = nn.Linear(40, 3)
        self.to(dtype)

    def forward(self, inputs: Tensor, seldom: bool = True) -> Tensor:
        x = torch.tanh(self.first(inputs))
        return self.head(torch.tanh(self.seldom(x)) if seldom else x)  # type: ignore[no-any-return]


def batch(step: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 10, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


ROW_OPTIONS: dict[str, Any] = OPTIONS | {"strategy": "spd", "shared_memory": False, "split_directions": False}


def body_bytes(rank: Rank, split: bool) -> tuple[list[int], int]:
    rank.init("gloo")
    model = DistributedDataParallel(Dense())
    optimizer = KFAC(model, gather_rows=True, **(ROW_OPTIONS | {"split_directions": split}))
    sent = []
    for step in range(STEPS):
        before = optimizer.stats()["sent_bytes"]
        optimizer.zero_grad()
        model(batch(step).chunk(rank.size)[rank.rank]).square().mean().backward()
        optimizer.step()
        sent.append(optimizer.stats()["sent_bytes"] - before)
    return [sent[step] for step in (4, 5, 7)], optimizer.stats()["memory_bytes"]


@pytest.mark.parametrize("split", [False, True])
def test_rows_are_all_that_travels_between_updates(split: bool) -> None:
    # To each other rank: the step, three counts, whether six blocks have their zeros, and four rows of each layer's
    # inputs and outputs, without any.
    elements = 4 + 6 + ROWS // 3 * (10 + 40 + 40 + 40 + 40 + 3)
    for sent, _ in run_ranks(body_bytes, 3, split):
        assert sent == [2 * 8 * elements] * 3


def body_zeros(rank: Rank, dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """What was sent between updates, and what should have been: masks and what is not zero, where that is less."""
    rank.init("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)).to(dtype)
    elements: list[int] = []
    width = dtype.itemsize

    def seen(block: Tensor) -> None:
        packed = -(-block.numel() // (8 * width)) + int(block.count_nonzero())
        elements.append(min(packed, block.numel()))

    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, inputs, output: (seen(inputs[0]), output.register_hook(seen))[0])
    ddp = DistributedDataParallel(model)
    optimizer = KFAC(ddp, gather_rows=True, **ROW_OPTIONS)
    sent, expected = [], []
    for step in range(STEPS):
        before = optimizer.stats()["sent_bytes"]
        elements.clear()
        optimizer.zero_grad()
        ddp(batch(step).to(dtype).chunk(rank.size)[rank.rank]).square().mean().backward()
        optimizer.step()
        if step % 3:
            sent.append(optimizer.stats()["sent_bytes"] - before)
            expected.append((rank.size - 1) * width * (1 + 3 + 6 + sum(elements)))
    equal_everywhere(model)
    assert optimizer.stats()["row_directions_refused"] == 0
    return sent, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_behind_a_relu_travel_without_their_zeros(dtype: torch.dtype) -> None:
    whole = dtype.itemsize * (10 + 4 * (10 + 40 + 40 + 30 + 30 + 3))
    for sent, expected in run_ranks(body_zeros, 3, dtype):
        assert sent == expected
        assert max(sent) < 0.8 * 2 * whole


Look = Callable[[Any, KFAC, int], Any]


def body_ahead(rank: Rank, look: Look, options: dict[str, Any], ddp: dict[str, Any]) -> dict[str, Any]:
    """Both ways; `look` at what is between backward() and step(), and afterwards at what that returned."""
    rank.init("gloo")
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


# Steps 1, 2, 4, 5 and 7 are of rows, 1 and 2 are what the next ones are foreseen by; three layers.
@pytest.mark.parametrize(
    ("look", "options", "ahead"),
    [
        (nothing, {}, 9),
        (nothing, {"kl_clip": 1e-9}, 9),
        (nothing, {"kl_clip": None}, 9),
        (nothing, {"split_directions": True}, 9),
        (nothing, {"shared_memory": True}, 0),
        (other_rate, {"kl_clip": 1e-9}, 0),
        (other_rate, {"kl_clip": None}, 9),  # nothing depends on it
        (other_factor, {}, 0),
        (once_another, {"kl_clip": 1e-9}, 3),
        (cleared, {}, 9),
    ],
)
def test_directions_are_written_ahead_where_their_factor_is_foreseen(
    look: Look, options: dict[str, Any], ahead: int
) -> None:
    for stats in run_ranks(body_ahead, 3, look, options, {}):
        assert (stats["row_directions"], stats["row_directions_ahead"]) == (15, ahead)


def test_directions_ahead_where_gradients_are_views_of_buckets() -> None:
    for stats in run_ranks(body_ahead, 3, nothing, {}, {"gradient_as_bucket_view": True}):
        assert (stats["row_directions"], stats["row_directions_ahead"]) == (15, 9)


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


def test_whoever_holds_a_gradient_sees_its_direction() -> None:
    for stats in run_ranks(body_ahead, 4, watch, {}, {}):
        assert (stats["row_directions"], stats["row_directions_ahead"]) == (15, 9)


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


def body_uneven(rank: Rank, shared: bool, split: bool) -> tuple[float, dict[str, Any]]:
    """Batches of other sizes on every rank, in every step; the last rank leaves a layer out in some."""
    rank.init("gloo")
    models = [DistributedDataParallel(Dense(), find_unused_parameters=True) for _ in range(2)]
    optimizers = [
        KFAC(model, gather_rows=rows, **(ROW_OPTIONS | {"shared_memory": shared, "split_directions": split}))
        for model, rows in zip(models, (False, True), strict=True)
    ]
    for step in range(STEPS):
        rows = (9, 5, 2)[rank.rank] - (2 if rank.rank == 0 and step % 3 == 2 else 0) + (3 if step == 7 else 0)
        mine = batch(10 * step + rank.rank, rows)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(mine, seldom=rank.rank < 2 or step % 2 == 0).square().mean().backward()
            optimizer.step()
    for model in models:
        equal_everywhere(model.module)
    whole, of_rows = (flat(model.module) for model in models)
    return float((whole - of_rows).abs().max() / (whole - flat(Dense())).abs().max()), optimizers[1].stats()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_ranks_whose_batches_differ(shared: bool, split: bool) -> None:
    for error, stats in run_ranks(body_uneven, 3, shared, split):
        assert error < 1e-9
        # In step 7 the first rank has more rows than places.
        assert (stats["row_directions"], stats["row_directions_refused"]) == (3 * 4, 3)


def body_no_sync(rank: Rank) -> float:
    """Gradients are accumulated without averaging, then averaged; under a scaler."""
    rank.init("gloo")
    found = []
    for rows in (False, True):
        model = DistributedDataParallel(Dense(torch.float32))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kfac = KFACPreconditioner(
            model,
            optimizer,
            strategy="pad",
            gather_rows=rows,
            damping=0.01,
            inverse_update_steps=3,
            shared_memory=False,
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
        assert (kfac.stats()["row_directions"] > 0) == rows
    return float((found[0] - found[1]).abs().max() / (found[0] - flat(Dense(torch.float32))).abs().max())


def test_accumulation_without_averaging_and_a_scaler() -> None:
    assert max(run_ranks(body_no_sync, 2)) < 1e-4


def body_penalty(rank: Rank, count: int, options: dict[str, Any]) -> tuple[int, int]:
    """One rank's loss has a penalty; every rank takes that layer's mean gradient whole."""
    rank.init("gloo")
    models = [DistributedDataParallel(Dense()) for _ in range(2)]
    optimizers = [
        KFAC(m, gather_rows=rows, **(ROW_OPTIONS | options)) for m, rows in zip(models, (False, True), strict=True)
    ]
    for step in range(count):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(batch(step).chunk(rank.size)[rank.rank]).square().mean()
            if rank.rank == 1:
                loss = loss + 1e-5 * model.module.seldom.weight.square().sum()
            loss.backward()
            optimizer.step()
    for model in models:
        equal_everywhere(model.module)
    torch.testing.assert_close(flat(models[0].module), flat(models[1].module), rtol=1e-9, atol=1e-9)
    stats = optimizers[1].stats()
    return stats["row_directions"], stats["row_directions_refused"]


@pytest.mark.parametrize("split", [False, True])
def test_a_penalty_on_one_rank(split: bool) -> None:
    assert run_ranks(body_penalty, 3, STEPS, {"split_directions": split}) == [(10, 5)] * 3


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_make_shares_again_where_rows_were_in_vain(shared: bool) -> None:
    """Linear layers whose directions are split take rows together; after eight tries or more in vain none does."""
    options = {"split_directions": True, "shared_memory": shared}
    # Steps 0, 3, 6, 9 and 12 make inverses: of the eight between them each had one layer of three in vain.
    assert run_ranks(body_penalty, 3, 18, options) == [(16, 8)] * 3


def steps(rank: Rank, count: int, *, ddp: bool = True, timeout: float = 20) -> tuple[Any, KFAC]:
    rank.init("gloo", timeout=timeout)
    model = DistributedDataParallel(Dense()) if ddp else Dense()
    optimizer = KFAC(model, gather_rows=True, **ROW_OPTIONS)
    for step in range(count):
        backward(model, optimizer, step, rank)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: Any, optimizer: KFAC, step: int, rank: Rank) -> None:
    optimizer.zero_grad()
    model(batch(step).chunk(rank.size)[rank.rank]).square().mean().backward()


def threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            count += (task / "comm").read_text().strip() == "tx_rows"
    return count


def body_nan(rank: Rank) -> tuple[int, int]:
    model, optimizer = steps(rank, 2)
    before = flat(model.module)
    inputs = batch(2).chunk(rank.size)[rank.rank].clone()
    inputs[0, 0] = float("nan") if rank.rank == 1 else 0.0
    model(inputs).square().mean().backward()
    optimizer.step()
    assert torch.equal(flat(model.module), before)
    for step in range(2, 6):
        backward(model, optimizer, step, rank)
        optimizer.step()
    equal_everywhere(model.module)
    return optimizer.stats()["skipped"], optimizer.stats()["row_directions_refused"]


def test_a_batch_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    assert run_ranks(body_nan, 2) == [(1, 0)] * 2


def body_left_out(rank: Rank) -> tuple[int, int]:
    """All ranks clear the gradients of a backward pass whose rows have left; then training goes on."""
    model, optimizer = steps(rank, 2)
    backward(model, optimizer, 50, rank)
    for step in range(2, 8):
        backward(model, optimizer, step, rank)  # clears
        optimizer.step()
    equal_everywhere(model.module)
    return optimizer.stats()["row_directions"], optimizer.stats()["row_directions_refused"]


def test_a_step_that_all_ranks_leave_out() -> None:
    # Steps 1, 4, 5 and 7 are of rows; those of step 2 had left with another batch's.
    assert run_ranks(body_left_out, 3) == [(3 * 4, 3)] * 3


def body_gone(rank: Rank) -> bool:
    """The optimizer goes after a backward pass whose rows are on their way; another one begins."""
    rank.init("gloo", timeout=30)
    model = DistributedDataParallel(Dense())
    for _ in range(2):
        optimizer = KFAC(model, gather_rows=True, **ROW_OPTIONS)
        for step in range(5):
            backward(model, optimizer, step, rank)
            optimizer.step()
        assert threads() == 1
        backward(model, optimizer, 5, rank)
        del optimizer
        gc.collect()
    equal_everywhere(model.module)
    return threads() == 0


def test_an_optimizer_may_go_between_backward_and_step() -> None:
    assert run_ranks(body_gone, 3) == [True] * 3


def body_peer_stopped(rank: Rank) -> float:
    """Rank 1 sends no rows; rank 0's thread waits for them while its optimizer goes."""
    model, optimizer = steps(rank, 2, ddp=False, timeout=60)
    if rank.rank == 0:
        backward(model, optimizer, 2, rank)
        start = time.monotonic()
        del optimizer
        gc.collect()
        seconds = time.monotonic() - start
        rank.report("gone")
        return seconds
    rank.pause()
    return 0.0


def test_the_end_of_an_optimizer_waits_for_no_peer() -> None:
    with launch(body_peer_stopped, 2) as ranks:
        ranks.expect("gone", [0])
        ranks.proceed([1])
        gone, _ = ranks.outcomes()
        assert gone.ok and gone.value < 5, gone


def body_forked(rank: Rank) -> int:
    """A child that was forked when the thread existed ends without it."""
    model, optimizer = steps(rank, 2)
    backward(model, optimizer, 2, rank)
    child = os.fork()
    if child == 0:
        del optimizer
        gc.collect()
        os._exit(7)
    optimizer.step()
    end = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.02)
    equal_everywhere(model.module)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_forked_child_lets_go_of_it() -> None:
    assert run_ranks(body_forked, 2) == [7, 7]


def body_killed(rank: Rank) -> Any:
    model, optimizer = steps(rank, 2, ddp=False, timeout=60)
    if rank.rank == 1:
        rank.report("ready")
        rank.pause()
    backward(model, optimizer, 2, rank)
    before = flat(model)
    error = elapsed_error(optimizer.step)
    return error, torch.equal(before, flat(model))


def test_a_dead_peer_ends_the_step() -> None:
    """What the thread's wait throws is thrown by step(), which changes nothing."""
    with launch(body_killed, 2) as ranks:
        ranks.expect("ready", [1])
        ranks.kill(1)
        (outcome,) = ranks.outcomes([0], deadline=40)
        (kind, text, seconds), unchanged = outcome.value
        assert kind == "RuntimeError" and "peer" in text and seconds < 20 and unchanged, (kind, text, seconds)


def body_options(rank: Rank) -> str:
    rank.init("gloo", timeout=20)
    with pytest.raises(dist.DistBackendError) as caught:
        KFAC(DistributedDataParallel(Dense()), gather_rows=rank.rank == 0)
    return str(caught.value)


def test_ranks_agree_on_the_option() -> None:
    for message in run_ranks(body_options, 2):
        assert "gather_rows" in message
