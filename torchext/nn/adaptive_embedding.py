"""Drop-in replacements for nn.EmbeddingBag and nn.Embedding whose rows have the widths that training gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchext.nn.adaptive_lookup import AdaptiveLookup, check_ids

__all__ = ["AdaptiveEmbedding", "AdaptiveEmbeddingBag"]


# DDP asks instances of nn.EmbeddingBag and nn.Embedding, and no others, whether their gradients are sparse.
class AdaptiveEmbeddingBag(AdaptiveLookup, nn.EmbeddingBag):  # type: ignore[misc]
    """nn.EmbeddingBag in which every vector has the width that its gradients ask for (FIITED, section 3).

    The table is cut into chunks along its columns, and only a budget of chunks is resident; absent ones read as zero.
    Every chunk, resident or not, collects utility: ``u <- gamma u + a g`` with ``a`` the row's accesses in the step and
    ``g`` the norm of the chunk's gradient. A :class:`ChunkPruner` lets the most useful ones in, now and then. With
    ``budget=1.0`` nothing is absent, nothing is observed, and this is nn.EmbeddingBag, whose parameter is
    :attr:`weight`, or which ``training="fused"`` updates in its backward pass.

    A table with a budget below 1 starts empty: without a pruner it stays empty. A checkpoint brings the budget that it
    was saved with into a table of the same layout: ``load_state_dict`` gives the pool that size, and
    :attr:`budget_chunks` says so (``"auto"`` chooses the layout by the budget: name it where budgets differ). What an
    optimizer holds of the pool must come from the same checkpoint; its next step raises ValueError where the sizes
    differ.

    Inside DistributedDataParallel the first forward pass of a table with a budget below 1 is collective, as rank 0
    sends its chunks: all ranks make it in the same iteration, or all wait. So is the first one inside another wrapper.

    Ways to train, ``training=``:
        ``"dense"``: a dense gradient of :attr:`pool` for any optimizer; the default, as nn.EmbeddingBag's.
        ``"sparse"`` (or ``sparse=True``): a sparse one, for SGD, Adagrad, SparseAdam; DDP on Gloo averages it.
        ``"fused"``: the update happens in the backward pass, with ``optimizer``, at :attr:`lr`. Refused inside DDP.
        ``"sharded"``: row r lives on rank r mod world; ids travel to their owners and bags come back, no gradient of
        the table does. The update is fused there, with the mean of all ranks' gradients, as DDP's would be. Modes sum
        and mean. Every rank calls forward and backward equally often; weights that some ranks give, or need a gradient
        of, are exchanged by all. Keep the module out of DDP, or let it be: its parameters are hidden from there, and
        from a model's ``requires_grad_``: call the table's own. Each rank saves and loads its own state_dict.

    Fused and sharded updates take the gradient as the backward pass brings it, before anyone can divide or clip it.
    ``torch.amp.GradScaler`` scales the loss, and so multiplies these updates by its factor: do not combine them. Train
    in bfloat16, which needs no scaler, or take ``"dense"`` or ``"sparse"``.

    Layouts (``layout="auto"`` picks by the budget): ``"direct"`` 8 bytes a chunk of the table, fastest (from 1/8
    resident); ``"hash"`` 11.4 bytes a resident chunk and 1 byte a chunk of the table (from 1/32); ``"sketch"`` 15 bytes
    a resident chunk and a bit a row. A chunk of 4 float32 holds 16 bytes, of 8 floats 32, of 16 floats 64: 8 to 16 pay
    best where bytes count, 4 where quality at a small budget does.

    An average of parameters, as ``torch.optim.swa_utils.AveragedModel`` takes it, goes slot by slot, and pruning gives
    slots to other chunks: begin it when pruning has ended, or anew after each pruning. What was averaged across one
    raises RuntimeError in its next forward pass, where the writes were such as autograd sees (not through ``.data``).

    Choices that the paper leaves open: gamma 0.99, decay by a growing factor; exact selection, equals stay; admitted
    chunks start at zero with fresh optimizer state, the chunks of a row's first admission at normal(0, init_std);
    row-wise Adagrad keeps one mean of squares *a chunk*; keys are stored and compared, rows never collide. In the
    sketch layout absent chunks compete for cells, so one that is rarely used may be forgotten.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        budget: Share of resident chunks, a float 0 < share <= 1, or their number as an int; of shards together, each
            its part by its rows.
        chunk_dim: Columns of a chunk: a divisor of embedding_dim from 4 on. Default: all columns with budget 1.0, else
            the largest of 16, 8, 4 that divides them, or all where none does.
        layout: ``"auto"``, ``"direct"``, ``"hash"`` or ``"sketch"``; with budget 1.0, which needs none, ``"auto"``.
        max_norm: As in nn.EmbeddingBag; above 0, and not for shards.
        norm_type: As there, above 0; infinity: the largest value counts.
        scale_grad_by_freq: As there.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        sparse: Short for ``training="sparse"``.
        include_last_offset: As there.
        padding_idx: As there.
        training: See above.
        optimizer: Of the fused or sharded update, as are lr, betas and eps: ``"sgd"``, ``"adagrad"`` (row-wise, a
            chunk) or ``"adam"`` (lazy, as torch.optim.SparseAdam).
        lr: 0 or more.
        betas: Of Adam, 0 <= beta < 1.
        eps: Of Adagrad and Adam, 0 or more.
        gamma: Decay of utility in a step, 0.5 <= gamma < 1. What is remembered is about 1 / (1 - gamma) steps: of ids
            that come more rarely it is chance whose chunks stay.
        init_std: Standard deviation of initial values, 0 or more.
        seed: Of the values of rows that are admitted for the first time, 0..2^63 - 1; the same on all ranks. Tables of
            one ChunkPruner get other values each, in the order of its modules; give equally large ones that are pruned
            by themselves seeds of their own.
        process_group: Of the shards; None: the default group.
        device: The CPU, or CUDA: there every forward pass waits for the check of its ids, CUDA graphs cannot record
            it, and shards need a group that exchanges such tensors (NCCL).
        dtype: float32, float64, bfloat16 or float16.

    Raises:
        ValueError: An argument out of its range, or one that would mean nothing beside the others; named with value
            and range.
        TypeError: An argument of a wrong type.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        budget: float = 1.0,
        chunk_dim: int | None = None,
        layout: str = "auto",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        training: str | None = None,
        optimizer: str = "adagrad",
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        gamma: float = 0.99,
        init_std: float = 1.0,
        seed: int = 0,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode = {mode!r}: allowed 'sum', 'mean', 'max'")
        if mode == "max" and (scale_grad_by_freq or training == "sharded"):
            raise ValueError("mode = 'max' goes with neither scale_grad_by_freq nor shards")
        super().__init__(
            num_embeddings,
            embedding_dim,
            mode=mode,
            include_last_offset=include_last_offset,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            padding_idx=padding_idx,
            budget=budget,
            chunk_dim=chunk_dim,
            layout=layout,
            sparse=sparse,
            training=training,
            optimizer=optimizer,
            lr=lr,
            betas=betas,
            eps=eps,
            gamma=gamma,
            init_std=init_std,
            seed=seed,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """The bags, (bags, embedding_dim).

        Args:
            input: Ids, 1-D with ``offsets`` or 2-D with a bag a row; int32 or int64.
            offsets: Where each bag begins, 1-D; with include_last_offset also where the last one ends.
            per_sample_weights: Of the shape of ``input``; mode sum only.

        Raises:
            TypeError: A wrong dtype.
            ValueError: Shapes or offsets that do not fit; named with position and value. Nothing is written.
            IndexError: An id out of range; named with position and value. Nothing is written.

        In a compiled graph max_norm may have scaled rows before a wrong offset is noticed.
        """
        if self._shards is None:
            self._check_given(input, offsets, per_sample_weights)
        else:
            try:
                self._shards.check_devices(self.pool.device, input, offsets, per_sample_weights)
                self._check_given(input, offsets, per_sample_weights)
            except (TypeError, ValueError, NotImplementedError) as error:
                self._shards.refuse(error, self.pool.device)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
        if input.dim() == 1:
            return self._look_up(input, offsets, 0, per_sample_weights, self.include_last_offset)
        if input.shape[1] == 0:  # shards exchange all the same, and the output is in autograd's graph
            empty = torch.zeros(input.shape[0], dtype=torch.int64, device=input.device)
            return self._look_up(input.reshape(-1), empty, 0, per_sample_weights, False)
        return self._look_up(input.reshape(-1), None, input.shape[1], per_sample_weights, False)

    def _check_given(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
        check_ids("input", input)
        if weights is not None:
            if weights.shape != input.shape:
                shapes = f"{tuple(weights.shape)}, input {tuple(input.shape)}"
                raise ValueError(f"per_sample_weights has shape {shapes}; they must be the same")
            if self.mode != "sum":
                raise NotImplementedError(f"per_sample_weights need mode 'sum', not {self.mode!r}")
            if self._shards is not None:
                self._check_weights(weights)
        if input.dim() not in (1, 2):
            raise ValueError(f"input has shape {tuple(input.shape)}; it must be 1-D or 2-D")
        if input.dim() == 2 and offsets is not None:
            raise ValueError("offsets must be None with a 2-D input: every row of it is a bag")
        if input.dim() == 1:
            if offsets is None:
                raise ValueError("offsets must be given with a 1-D input")
            check_ids("offsets", offsets)
            if offsets.dim() != 1:
                raise ValueError(f"offsets has shape {tuple(offsets.shape)}; it must be 1-D")


class AdaptiveEmbedding(AdaptiveLookup, nn.Embedding):  # type: ignore[misc]
    """nn.Embedding in which every vector has the width that its gradients ask for.

    All but ``mode``, offsets and weights is as in :class:`AdaptiveEmbeddingBag`. As in nn.Embedding, ``padding_idx`` is
    looked up like any other row; it gets no gradient.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        budget: float = 1.0,
        chunk_dim: int | None = None,
        layout: str = "auto",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        training: str | None = None,
        optimizer: str = "adagrad",
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        gamma: float = 0.99,
        init_std: float = 1.0,
        seed: int = 0,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            mode="sum",
            include_last_offset=False,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            padding_idx=padding_idx,
            budget=budget,
            chunk_dim=chunk_dim,
            layout=layout,
            sparse=sparse,
            training=training,
            optimizer=optimizer,
            lr=lr,
            betas=betas,
            eps=eps,
            gamma=gamma,
            init_std=init_std,
            seed=seed,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        self._skipped = None

    def forward(self, input: Tensor) -> Tensor:
        """The vectors, (*input.shape, embedding_dim); input is int32 or int64, of any shape.

        Raises:
            TypeError: A wrong dtype.
            IndexError: An id out of range; named with position and value.
        """
        if self._shards is None:
            check_ids("input", input)
        else:
            try:
                self._shards.check_devices(self.pool.device, input)
                check_ids("input", input)
            except (TypeError, ValueError) as error:
                self._shards.refuse(error, self.pool.device)
        flat = input.reshape(-1)
        found = self._look_up(flat, None, 1, None, False)
        return found.view(*input.shape, found.shape[1])
