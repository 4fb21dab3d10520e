"""The operators of the adaptive embedding bag: fake kernels, derivative, and the three ways to train.

The schemas and kernels are in ``kernels/`` (``adaptive_bag.h`` says which tensor holds what). Everything here
works on shapes; nothing looks at an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchext._build import load_native

load_native("_kernels")

__all__ = ["BagSpec", "Table", "adaptive_bag", "train_bag", "written"]

_ops = torch.ops.torchext


class BagSpec(NamedTuple):
    """What is fixed about a module: sizes, how bags are read, how the backward pass treats their gradient."""

    num_embeddings: int
    chunks: int
    mode: int
    padding_idx: int  # left out of bags; -1: none
    frozen_idx: int  # gets no gradient; -1: none
    include_last_offset: bool
    scale_by_frequency: bool
    gamma: float
    training: str
    optimizer: str
    beta1: float
    beta2: float
    eps: float


class Table(NamedTuple):
    """The tensors of a table besides its pool."""

    chunk_index: Tensor
    utility: Tensor
    sketch: Tensor
    clock: Tensor
    lr: Tensor
    state: list[Tensor]


def _bags(ids: Tensor, offsets: Tensor | None, bag_size: int, include_last_offset: bool) -> Any:
    """Number of bags; may be a symbol."""
    if offsets is not None:
        return offsets.numel() - (1 if include_last_offset else 0)
    return ids.numel() // bag_size if bag_size > 0 else 0


@torch.library.register_fake("torchext::adaptive_bag")  # type: ignore[untyped-decorator]
def _(
    pool: Tensor,
    index: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    bag_size: int,
    include_last_offset: bool,
    per_sample_weights: Tensor | None,
    num_embeddings: int,
    chunks: int,
    mode: int,
    padding_idx: int,
) -> tuple[Tensor, Tensor]:
    bags = _bags(ids, offsets, bag_size, include_last_offset)
    dim = chunks * pool.size(1)
    return pool.new_empty(bags, dim), pool.new_empty(bags if mode == 2 else 0, dim, dtype=torch.int32)


@torch.library.register_fake("torchext::adaptive_bag_weight_gradient")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, pool: Tensor, index: Tensor, ids: Tensor, *_: Any) -> Tensor:
    return pool.new_empty(ids.shape)


@torch.library.register_fake("torchext::adaptive_bag_dense_gradient")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, argmax: Tensor, pool: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(pool)


@torch.library.register_fake("torchext::adaptive_bag_sparse_gradient")  # type: ignore[untyped-decorator]
def _(gradient: Tensor, argmax: Tensor, pool: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    touched = torch.library.get_ctx().new_dynamic_size()
    return pool.new_empty(touched, dtype=torch.int64), pool.new_empty(touched, pool.size(1))


def _nothing(*_: Any) -> None:
    pass


for _name in ("adaptive_bag_observe_", "adaptive_bag_update_", "adaptive_bag_renorm_", "adaptive_table_carry_"):
    torch.library.register_fake(f"torchext::{_name}", _nothing)


@torch.library.register_fake("torchext::adaptive_table_prune_")  # type: ignore[untyped-decorator]
def _(index: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    moves, admitted, dropped = (index.new_empty(context.new_dynamic_size(), 2, dtype=torch.int64) for _ in range(3))
    return moves, admitted, dropped


@torch.library.register_fake("torchext::adaptive_table_meet_")  # type: ignore[untyped-decorator]
def _(seen: Tensor, *_: Any) -> Tensor:
    return seen.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


@torch.library.register_fake("torchext::adaptive_table_candidates")  # type: ignore[untyped-decorator]
def _(index: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.library.get_ctx().new_dynamic_size()
    keys, slots = (index.new_empty(found, dtype=torch.int64) for _ in range(2))
    return keys, slots, index.new_empty(found, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    pool, index, ids, offsets, bag_size, include_last_offset, weights, *sizes = inputs
    ctx.save_for_backward(pool, index, ids, offsets, weights, output[1])
    ctx.layout = (bag_size, include_last_offset)
    ctx.sizes = sizes


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    pool, index, ids, offsets, weights, argmax = ctx.saved_tensors
    layout = (ids, offsets, *ctx.layout, weights, *ctx.sizes)
    pool_gradient = weight_gradient = None
    if ctx.needs_input_grad[0]:
        pool_gradient = _ops.adaptive_bag_dense_gradient(gradient, argmax, pool, index, *layout, False)
    if ctx.needs_input_grad[6]:
        weight_gradient = _ops.adaptive_bag_weight_gradient(gradient, pool, index, *layout)
    return pool_gradient, None, None, None, None, None, weight_gradient, None, None, None, None


torch.library.register_autograd("torchext::adaptive_bag", _backward, setup_context=_setup_context)


def adaptive_bag(
    pool: Tensor,
    table: Table,
    ids: Tensor,
    offsets: Tensor | None,
    bag_size: int,
    per_sample_weights: Tensor | None,
    spec: BagSpec,
) -> Tensor:
    """The bags of a table, shape (bags, dim), differentiable towards ``pool`` (densely) and the weights."""
    output, _ = _ops.adaptive_bag(
        pool,
        table.chunk_index,
        ids,
        offsets,
        bag_size,
        spec.include_last_offset,
        per_sample_weights,
        spec.num_embeddings,
        spec.chunks,
        spec.mode,
        spec.padding_idx,
    )
    return output  # type: ignore[no-any-return]


def written(tensor: Tensor) -> None:
    """Tells autograd that an operator has written to a pool or an index; compiled graphs find out by themselves."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensor)


def _arrangement(index: Tensor) -> int | None:
    """Says, compared with what it was, whether chunks have changed their slots; None: they never do, or nobody counts.

    Neither pass writes an index. Who does, or puts another in its place, counts its version up.
    """
    # In a compiled graph autograd itself compares the versions of what is saved.
    if torch.compiler.is_compiling() or index.numel() == 0 or index.is_inference():
        return None
    return index._version


class _TrainBag(torch.autograd.Function):
    """The bags, and a backward pass that collects utility and then yields a gradient or updates the table."""

    @staticmethod
    def forward(
        ctx: Any,
        pool: Tensor,
        trigger: Tensor | None,
        weights: Tensor | None,
        ids: Tensor,
        offsets: Tensor | None,
        bag_size: int,
        spec: BagSpec,
        index: Tensor,
        utility: Tensor,
        sketch: Tensor,
        clock: Tensor,
        lr: Tensor,
        *state: Tensor,
    ) -> Tensor:
        del trigger  # only tells autograd that there is something to train
        output, argmax = _ops.adaptive_bag(
            pool,
            index,
            ids,
            offsets,
            bag_size,
            spec.include_last_offset,
            weights,
            spec.num_embeddings,
            spec.chunks,
            spec.mode,
            spec.padding_idx,
        )
        # Not saved for backward: these are overwritten on purpose, there and by a second backward pass through the same
        # table, which autograd would take for a mistake.
        ctx.table = (pool.detach(), index, utility, sketch, clock, lr, state)
        ctx.save_for_backward(ids, offsets, weights, argmax)
        ctx.spec, ctx.bag_size = spec, bag_size
        ctx.version = None if torch.compiler.is_compiling() else pool._version
        ctx.arrangement = _arrangement(index)
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        pool, index, utility, sketch, clock, lr, state = ctx.table
        ids, offsets, weights, argmax = ctx.saved_tensors
        spec: BagSpec = ctx.spec
        layout = (ids, offsets, ctx.bag_size, spec.include_last_offset, weights)
        layout = (*layout, spec.num_embeddings, spec.chunks, spec.mode, spec.frozen_idx)  # type: ignore[assignment]
        observed = (index, utility, sketch, clock)
        weight_gradient = pool_gradient = trigger_gradient = None
        if ctx.arrangement is not None and ctx.arrangement != _arrangement(index):
            # The index may name slots that the pool looked up has not, and another pool may be in its place.
            raise RuntimeError(
                "backward pass of a table whose chunks have changed their slots since the forward pass: it has been "
                "pruned, reset, or has taken a checkpoint, and the gradient belongs to a table that is no more. Prune "
                "and load after backward() and before the next forward pass; look the ids up again"
            )
        if ctx.needs_input_grad[2]:  # before the update changes what it is made of
            if ctx.version is not None and ctx.version != pool._version:
                raise RuntimeError(
                    "the gradient of per_sample_weights needs the table as it was in the forward pass, but it has been "
                    "changed: by the fused update of another backward pass, by an optimizer, or by max_norm. Look ids "
                    "up in one call, call backward before the next forward pass, or take training='sparse'"
                )
            weight_gradient = _ops.adaptive_bag_weight_gradient(gradient, pool, index, *layout)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            pass  # frozen: only weights are trained, nothing of the table changes
        elif spec.training == "fused":
            _ops.adaptive_bag_update_(
                gradient,
                argmax,
                pool,
                state,
                *observed,
                lr,
                *layout,
                spec.scale_by_frequency,
                spec.gamma,
                spec.optimizer,
                spec.beta1,
                spec.beta2,
                spec.eps,
            )
            written(pool)
            trigger_gradient = pool.new_zeros(0)
        elif spec.training == "sparse":
            slots, values = _ops.adaptive_bag_sparse_gradient(
                gradient, argmax, pool, *observed, *layout, spec.scale_by_frequency, spec.gamma
            )
            pool_gradient = torch.sparse_coo_tensor(
                slots.unsqueeze(0), values, pool.shape, device=values.device, check_invariants=False
            )
        else:
            if utility.numel() > 0:
                _ops.adaptive_bag_observe_(
                    gradient, argmax, pool, *observed, *layout, spec.scale_by_frequency, spec.gamma
                )
            pool_gradient = _ops.adaptive_bag_dense_gradient(
                gradient, argmax, pool, index, *layout, spec.scale_by_frequency
            )
        return (pool_gradient, trigger_gradient, weight_gradient, *(None,) * (9 + len(state)))


def train_bag(
    pool: Tensor,
    trigger: Tensor | None,
    table: Table,
    ids: Tensor,
    offsets: Tensor | None,
    bag_size: int,
    per_sample_weights: Tensor | None,
    spec: BagSpec,
) -> Tensor:
    """The bags of a table, shape (bags, dim); the backward pass trains it as ``spec.training`` says."""
    index, utility, sketch, clock, lr, state = table
    return _TrainBag.apply(  # type: ignore[no-any-return]
        pool, trigger, per_sample_weights, ids, offsets, bag_size, spec, index, utility, sketch, clock, lr, *state
    )
