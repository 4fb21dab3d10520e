"""Sparse gradients and fused updates are torch's dense gradient and its optimizers, whatever a table is made with."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from adaptive_tables import Draw, RowwiseAdagrad, close
from torch import Tensor, nn

from torchext.nn import AdaptiveEmbedding, AdaptiveEmbeddingBag

OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).to(weight.dtype)


class Oracle:
    """A dense gradient by torch, of which an optimizer gets the rows that were looked up.

    So every mode and option can be compared, those too that torch has not with sparse gradients.
    """

    def __init__(self, theirs: nn.Module, dtype: torch.dtype, held_in: torch.dtype) -> None:
        """dtype: of the table; held_in: of the weights that the optimizer has, and so of its state."""
        self.theirs, self.dtype = theirs, dtype
        self.held = nn.Parameter(theirs.weight.detach().to(held_in))
        # max_norm writes, and what it writes is rounded before it is used.
        self.clip, theirs.max_norm = (theirs.max_norm, theirs.norm_type), None

    def prepare(self, ids: Tensor) -> None:
        """Of a forward pass."""
        if self.clip[0] is not None:
            torch.embedding_renorm_(self.theirs.weight.detach(), ids.reshape(-1).long(), *self.clip)
            self.theirs.weight.data = rounded(self.theirs.weight.data, self.dtype)
            self.held.data.copy_(self.theirs.weight.data)

    def gradient(self, ids: Tensor) -> Tensor:
        """Of the rows that were looked up, sparse."""
        rows = ids.reshape(-1).long().unique()
        rows = rows[rows != (-1 if self.theirs.padding_idx is None else self.theirs.padding_idx)]
        dense, self.theirs.weight.grad = self.theirs.weight.grad, None
        assert dense is not None
        self.held.grad = torch.sparse_coo_tensor(
            rows.unsqueeze(0), dense[rows].to(self.held.dtype), dense.shape, check_invariants=True
        )
        return self.held.grad

    def go_on_from(self, weight: Tensor) -> None:
        """From ours, equal to rounding: another rounding must not make another row the largest in a later step."""
        self.theirs.weight.data.copy_(weight)
        self.held.data.copy_(weight)


def draw_again(draw: Draw) -> None:
    """Other ids: rows that are not looked up keep their optimizer's state."""
    draw.ids = torch.randint_like(draw.ids, 0, draw.rows)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("seed", range(200, 230))
def test_sparse_gradient_equals_the_dense_one_of_torch(seed: int, name: str) -> None:
    draw = Draw(seed)
    ours, theirs = draw.pair(training="sparse")
    theirs.sparse = False
    oracle = Oracle(theirs, draw.dtype, draw.dtype)
    options: dict[str, Any] = {"lr": 0.1} | ({"betas": (0.7, 0.95)} if name == "adam" else {})
    if name != "sgd" and draw.dtype == torch.float16:
        options["eps"] = 1e-3  # its own is 0 there, and a gradient of 0 makes NaN
    optimizers = [OPTIMIZERS[name]([parameter], **options) for parameter in (oracle.held, ours.pool)]
    for _ in range(3):
        draw_again(draw)
        oracle.prepare(draw.ids)
        expected, expected_weights, upstream = draw.step(theirs, None, None)
        output, weights, _ = draw.step(ours, None, upstream)
        close(output, expected)
        close(ours.weight, oracle.held.detach())
        if weights is not None:
            close(weights, expected_weights)
        gradient, expected = ours.pool.grad, oracle.gradient(draw.ids)
        assert gradient is not None
        close(gradient.to_dense().view(draw.rows, draw.dim), expected.to_dense())
        slots = gradient._indices().flatten() * len(oracle.held) // len(ours.pool)
        assert torch.equal(slots.unique(), expected._indices().flatten())  # those rows, and all of them
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        close(ours.weight, oracle.held.detach())
        oracle.go_on_from(ours.weight)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("seed", range(300, 340))
def test_fused_update_equals_embedding_bag_and_optimizer(seed: int, name: str) -> None:
    draw = Draw(seed)
    pick = random.Random(seed)
    update: dict[str, Any] = {"lr": 0.1}
    if name != "sgd":
        update["eps"] = pick.choice([1e-8, 1e-3])
    if name == "adam":
        update["betas"] = pick.choice([(0.9, 0.999), (0.5, 0.8), (0.0, 0.9)])
    ours, theirs = draw.pair(training="fused", optimizer=name, **update)
    oracle = Oracle(theirs, draw.dtype, theirs.weight.dtype)  # state of 16-bit tables is float32
    optimizer = (
        RowwiseAdagrad([oracle.held], ours.chunk_dim, **update)
        if name == "adagrad"
        else OPTIMIZERS[name]([oracle.held], **update)
    )
    for _ in range(3):
        draw_again(draw)
        oracle.prepare(draw.ids)
        expected, expected_weights, upstream = draw.step(theirs, None, None)
        output, weights, _ = draw.step(ours, None, upstream)
        close(output, expected)
        if weights is not None:
            close(weights, expected_weights)
        oracle.gradient(draw.ids)
        optimizer.step()
        close(ours.weight, oracle.held.detach())
        oracle.go_on_from(ours.weight)
    assert ours.pool.grad is None


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
@pytest.mark.parametrize("training", ["dense", "sparse", "fused"])
def test_ids_past_the_last_offset_are_in_no_bag(training: str, mode: str, weighted: bool) -> None:
    torch.manual_seed(3)
    theirs = nn.EmbeddingBag(9, 8, mode=mode, include_last_offset=True, max_norm=2.0)
    ours = AdaptiveEmbeddingBag(
        9, 8, mode=mode, include_last_offset=True, max_norm=2.0, training=training, chunk_dim=4,
        **{"optimizer": "sgd", "lr": 0.5} if training == "fused" else {},
    )  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    ids, offsets = torch.tensor([1, 2, 3, 2, 4, 4, 2]), torch.tensor([0, 2, 2, 4])
    given = [torch.randn(7).requires_grad_() if weighted else None]
    given.append(None if given[0] is None else given[0].detach().clone().requires_grad_())
    output = ours(ids, offsets, given[0])
    if mode == "sum":  # in the others torch counts them in, and its gradient of them is anything
        close(output, theirs(ids, offsets, given[1]).detach())
    else:
        theirs(torch.tensor([4]), torch.tensor([0, 1]))  # is clipped all the same
    expected = theirs(ids[:4], offsets, None if given[1] is None else given[1][:4])
    close(output, expected.detach())
    upstream = torch.randn(3, 8)
    output.backward(upstream)
    expected.backward(upstream)
    if training != "fused":
        torch.optim.SGD(ours.parameters(), lr=0.5).step()
    torch.optim.SGD(theirs.parameters(), lr=0.5).step()
    close(ours.weight, theirs.weight.detach())
    if given[0] is not None and given[1] is not None:
        assert given[0].grad is not None and given[1].grad is not None
        close(given[0].grad, given[1].grad)
        assert not given[0].grad[4:].any()


@pytest.mark.parametrize("training", ["dense", "sparse", "sgd", "adagrad", "adam"])
@pytest.mark.parametrize("seed", range(400, 412))
def test_embedding_equals_embedding_in_training(seed: int, training: str) -> None:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    dtype = pick.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options: dict[str, Any] = {"padding_idx": pick.choice([None, 3, -1])}
    if pick.random() < 0.4:
        options |= {"max_norm": pick.choice([0.5, 2.0]), "norm_type": pick.choice([1.0, 2.0, 3.0])}
    if pick.random() < 0.5:
        options["scale_grad_by_freq"] = True
    theirs = nn.Embedding(20, 8, dtype=wide, **options)
    theirs.weight.data = rounded(theirs.weight.data, dtype)
    fused = training in OPTIMIZERS
    update: dict[str, Any] = (
        {"training": "fused", "optimizer": training, "lr": 0.1} if fused else {"training": training}
    )
    ours = AdaptiveEmbedding(20, 8, dtype=dtype, chunk_dim=4, **options, **update)
    ours.load_state_dict({"weight": theirs.weight.detach()})
    oracle = Oracle(theirs, dtype, wide)
    reference: torch.optim.Optimizer
    if training == "adagrad":
        reference = RowwiseAdagrad([oracle.held], 4, 0.1)
    else:
        reference = OPTIMIZERS["adam" if training == "adam" else "sgd"]([oracle.held], lr=0.1)
    own = None if fused else torch.optim.SGD(ours.parameters(), lr=0.1)
    for _ in range(3):
        ids = torch.randint(
            0, 20, pick.choice([(7,), (4, 5), (2, 0, 3), ()]), dtype=pick.choice([torch.int32, torch.int64])
        )
        oracle.prepare(ids)
        expected, output = theirs(ids), ours(ids)
        close(output, expected.detach())
        upstream = torch.randn(expected.shape).to(dtype)
        expected.backward(upstream.to(wide))
        output.backward(upstream)
        oracle.gradient(ids)
        reference.step()
        if own is not None:
            own.step()
            own.zero_grad()
        close(ours.weight, oracle.held.detach())
        oracle.go_on_from(ours.weight)
