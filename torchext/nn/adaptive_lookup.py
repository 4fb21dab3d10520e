"""The forward pass of an adaptive table, which bags and single vectors share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchext.base.plain import plain
from torchext.nn.adaptive_table import AdaptiveTable
from torchext.nn.lineage import Origin
from torchext.nn.operators import _ops, adaptive_bag, train_bag, written
from torchext.nn.shards import Shards
from torchext.nn.table_options import TableOptions, check_size, flag, norm_of, offsets_problem, padding_of

if TYPE_CHECKING:
    from typing import Self

__all__ = ["AdaptiveLookup", "check_ids"]


def check_ids(name: str, tensor: Tensor) -> None:
    """Raises TypeError for what cannot be ids or offsets."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {tensor.dtype}; it must be int32 or int64")


class AdaptiveLookup(AdaptiveTable):
    """What :class:`AdaptiveEmbeddingBag` and :class:`AdaptiveEmbedding` do alike when ids are looked up."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    mode: str
    include_last_offset: bool
    _frozen: int | None  # gets no gradient
    _skipped: int | None  # is left out of bags

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str,
        include_last_offset: bool,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        padding_idx: int | None,
        sparse: bool,
        training: str | None,
        process_group: Any,
        device: Any,
        dtype: Any,
        **options: Any,
    ) -> None:
        num_embeddings, embedding_dim = plain(num_embeddings), plain(embedding_dim)
        sparse = flag("sparse", sparse)
        if sparse and training not in (None, "sparse"):
            raise ValueError(f"sparse = True with training = {training!r}: give one of them")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_size(num_embeddings, embedding_dim, dtype)
        padding_idx = padding_of(padding_idx, num_embeddings)
        max_norm, norm_type = norm_of(max_norm, norm_type, sharded=training == "sharded")
        made = TableOptions(training=training or ("sparse" if sparse else "dense"), **options)
        made.check_used()
        if process_group is not None and made.training != "sharded":
            raise ValueError(
                f"process_group = {process_group!r}: allowed with training = 'sharded', which shares rows out in it, "
                f"this is {made.training!r}; leave it out"
            )
        self._shards: Shards | None = None
        rows = num_embeddings
        shards = None
        if made.training == "sharded":
            shards = Shards(num_embeddings, process_group)
            rows, made = shards.rows, made.of_shard(shards.rank, shards.rows, num_embeddings, embedding_dim)
        super().__init__(rows, embedding_dim, made, device=device, dtype=dtype)
        self._shards = shards
        if shards:
            self.shard = torch.tensor([shards.rank, shards.world, num_embeddings], device="cpu")
        self.sparse = made.training == "sparse"
        self.mode, self.include_last_offset = mode, flag("include_last_offset", include_last_offset)
        self.scale_grad_by_freq = flag("scale_grad_by_freq", scale_grad_by_freq)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.padding_idx = padding_idx
        self._frozen = self._skipped = shards.local(padding_idx) if shards else padding_idx
        self._zero_row(self._frozen)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Self:
        """A table with these values; under a budget the chunks with the largest norms are resident.

        Args:
            embeddings: (rows, columns); for shards of the whole table, on every rank.
            freeze: Whether the table is not trained.
            **options: Of the class.
        """
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings have shape {tuple(embeddings.shape)}; they must be 2-D")
        made = cls(*embeddings.shape, **{"dtype": embeddings.dtype, "device": embeddings.device, **options})
        made._take(embeddings)
        return made.requires_grad_(not flag("freeze", freeze))

    def _take(self, embeddings: Tensor) -> None:
        if self._shards is not None and len(embeddings) == self._shards.num_embeddings:
            embeddings = self._shards.share(embeddings)
        super()._take(embeddings)

    def _look_up(
        self, ids: Tensor, offsets: Tensor | None, bag_size: int, per_sample_weights: Tensor | None, last: bool
    ) -> Tensor:
        pool = self.pool  # once, as what has been put in the place of a weight may be computed anew each time
        if self._whole and self.index.device != pool.device:  # a weight that has been put there by itself
            self._make_plain()
        if self._strange_to_ddp():
            self._meet_ddp()
        if self._origin is not None:
            self._origin.check(self)
        if self._shards is not None:
            return self._shards.look_up(self, ids, offsets, bag_size, per_sample_weights, last)
        if self.max_norm is not None:
            if not torch.compiler.is_compiling():  # its tensors have no values yet
                self._check_before_writing(len(ids), offsets, per_sample_weights, last)
            self._clip(pool, ids, self.max_norm)
        return self._bags(pool, ids, offsets, bag_size, per_sample_weights, last, self.mode)

    @torch.no_grad()
    def _clip(self, pool: Tensor, ids: Tensor, max_norm: float) -> None:
        """Scales rows of the ids that are longer."""
        held = pool.detach()
        clipped = held.contiguous()
        _ops.adaptive_bag_renorm_(clipped, self.index, ids, *self._cut(pool), max_norm, self.norm_type)
        if not held.is_contiguous():
            held.copy_(clipped)
        written(pool)
        if self._origin is not None and not torch.compiler.is_compiling():
            self._origin = Origin.of(self, self._origin.copied)

    def _check_before_writing(self, ids: int, offsets: Tensor | None, weights: Tensor | None, last: bool) -> None:
        """What the bags' operator would refuse, when max_norm has scaled rows. Ids are checked where that is done."""
        problem = "" if offsets is None else offsets_problem(ids, offsets, last)
        if problem:
            raise ValueError(problem)
        if weights is not None:
            self._check_weights(weights)

    def _check_weights(self, weights: Tensor) -> None:
        if weights.dtype != self.pool.dtype:
            raise TypeError(
                f"per_sample_weights is {weights.dtype}, the table {self.pool.dtype}; they must be the same"
            )

    def _bags(
        self,
        pool: Tensor,
        ids: Tensor,
        offsets: Tensor | None,
        bag_size: int,
        weights: Tensor | None,
        last: bool,
        mode: str,
    ) -> Tensor:
        """This rank's rows only."""
        spec = self._spec(pool, mode, self._skipped, self._frozen, last, self.scale_grad_by_freq)
        if self.training_mode == "sharded":
            spec = spec._replace(training="fused")
        trains = (pool if self.trigger is None else self.trigger).requires_grad
        pool = pool.contiguous()  # a weight that a script has put there may be a transpose
        if not torch.is_grad_enabled() or not (trains or (weights is not None and weights.requires_grad)):
            return adaptive_bag(pool.detach(), self._table, ids, offsets, bag_size, weights, spec)
        pool = pool if self.trigger is None else pool.detach()
        return train_bag(pool, self.trigger, self._table, ids, offsets, bag_size, weights, spec)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        total = self.num_embeddings * self.chunks
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, chunk_dim={self.chunk_dim}, "
            f"budget={self.budget_chunks}/{total} chunks, layout={self.layout!r}, training={self.training_mode!r}"
        )
