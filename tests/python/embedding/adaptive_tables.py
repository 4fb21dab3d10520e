"""Tables that the tests of adaptive embeddings share, ways to call them, and when two are equal."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from torchext.nn import AdaptiveEmbeddingBag

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(ours: Tensor, theirs: Tensor) -> None:
    theirs = theirs.to(ours.dtype)
    tolerance = TOLERANCE[theirs.dtype]
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


def torch_scales_by_frequency() -> bool:
    """torch 2.11 counts wrongly where an id repeats after another one: there is nothing to compare with then."""
    bag = nn.EmbeddingBag(2, 1, mode="sum", scale_grad_by_freq=True)
    bag(torch.tensor([[1, 0, 0]])).backward(torch.ones(1, 1))
    assert bag.weight.grad is not None
    return bag.weight.grad.tolist() == [[1.0], [1.0]]


SCALES = torch_scales_by_frequency()


class Draw:
    """One random way to call an embedding bag that torch accepts."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        torch.manual_seed(seed)
        self.rows = pick.choice([1, 7, 60])
        self.chunk_dim = pick.choice([4, 5, 8, 12])
        self.dim = self.chunk_dim * pick.choice([1, 2, 3, 5])
        self.dtype = pick.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
        self.mode = pick.choice(["sum", "mean", "max"])
        self.options: dict[str, Any] = {"mode": self.mode, "dtype": self.dtype}
        if pick.random() < 0.4:
            self.options["padding_idx"] = pick.randrange(-self.rows, self.rows)
        if pick.random() < 0.2:
            self.options |= {"max_norm": pick.choice([0.5, 2.0]), "norm_type": pick.choice([1.0, 2.0, 3.0])}
        if self.mode != "max" and pick.random() < 0.3 and SCALES:
            self.options["scale_grad_by_freq"] = True
        bags = pick.choice([0, 1, 5, 33])
        ids_type, offsets_type = (pick.choice([torch.int32, torch.int64]) for _ in range(2))
        self.offsets: Tensor | None = None
        if pick.random() < 0.3:
            self.ids = torch.randint(0, self.rows, (bags, pick.choice([1, 4])), dtype=ids_type)
        else:
            sizes = torch.tensor([pick.choice([0, 0, 1, 3, 9]) for _ in range(bags)], dtype=torch.int64)
            ends = sizes.cumsum(0)
            self.ids = torch.randint(0, self.rows, (int(sizes.sum()),), dtype=ids_type)
            self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(offsets_type)
            if pick.random() < 0.5:
                self.options["include_last_offset"] = True
            else:
                self.offsets = self.offsets[:-1]
        self.weights = None
        if self.mode == "sum" and pick.random() < 0.5:
            self.weights = torch.randn(self.ids.shape).to(self.dtype)

    def pair(self, **options: Any) -> tuple[AdaptiveEmbeddingBag, nn.EmbeddingBag]:
        # torch adds 16-bit gradients up in 16 bits; the reference computes in float32 with the same rounded values.
        wide = torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype
        sparse = options.get("training") == "sparse"
        theirs = nn.EmbeddingBag(self.rows, self.dim, **self.options | {"dtype": wide}, sparse=sparse)
        theirs.weight.data = theirs.weight.data.to(self.dtype).to(wide)
        options.setdefault("chunk_dim", None if self.chunk_dim == self.dim else self.chunk_dim)
        ours = AdaptiveEmbeddingBag(self.rows, self.dim, **self.options, **options)
        ours.load_state_dict({"weight": theirs.weight.detach()})
        return ours, theirs

    def call(self, bag: nn.Module, ids: Tensor, weights: Tensor | None, offsets: Tensor | None) -> Tensor:
        same = ids if isinstance(bag, AdaptiveEmbeddingBag) or offsets is None else ids.to(torch.int64)
        if offsets is not None and not isinstance(bag, AdaptiveEmbeddingBag):
            offsets = offsets.to(torch.int64)
        output: Tensor = bag(same, offsets, weights)
        return output

    def step(self, bag: nn.Module, optimizer: torch.optim.Optimizer | None, upstream: Tensor | None) -> Any:
        dtype = next(bag.parameters()).dtype
        weights = None if self.weights is None else self.weights.to(dtype, copy=True).requires_grad_()
        output = self.call(bag, self.ids, weights, self.offsets)
        if upstream is None:
            upstream = torch.randn(output.shape).to(self.dtype)
        output.backward(upstream.to(dtype))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return output.detach(), None if weights is None else weights.grad, upstream


class RowwiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad, which torch has not: a mean of squares for each chunk, of either kind of gradient."""

    def __init__(self, params: Any, chunk_dim: int, lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"chunk_dim": chunk_dim, "lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for held in group["params"]:
                gradient = held.grad.to_dense().double().view(-1, group["chunk_dim"])
                sums = self.state[held].setdefault("sums", torch.zeros_like(gradient))  # moves with a pool's chunks
                sums += gradient.square().mean(1, keepdim=True)
                change = group["lr"] * gradient / (sums.sqrt() + group["eps"])
                held -= change.view_as(held).to(held.dtype)


def trained(layout: str = "hash", **options: Any) -> AdaptiveEmbeddingBag:
    torch.manual_seed(4)
    given = {"budget": 0.3, "chunk_dim": 4, "layout": layout, "training": "fused", "optimizer": "adam", **options}
    bag = AdaptiveEmbeddingBag(50, 8, **given)
    for _ in range(5):
        bag(torch.randint(0, 50, (10, 4))).sub(1).square().sum().backward()
        bag.prune()
    return bag
