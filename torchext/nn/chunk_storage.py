"""Chunk storage holds an adaptive table: values, index, utilities, optimizer state, by layout and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchext.nn.operators import _ops, written
from torchext.nn.table_options import (
    OPTIMIZERS,
    TableOptions,
    capacity_of,
    check_device,
    check_size,
    chunk_dim_of,
    layout_of,
    learning_rate,
    refuse,
)
from torchext.nn.table_weight import TableWeight

__all__ = ["ChunkStorage", "drop_gradients", "replace_values", "with_rows"]


def _drop(anchor: Tensor) -> None:
    anchor.grad = None


def drop_gradients(anchor: nn.Parameter) -> None:
    """Leaves none on an anchor after a backward pass: an empty one has no largest value for clip_grad_norm_.

    A copy of the anchor needs it anew.
    """
    trains = anchor.requires_grad  # only then it takes hooks, and keeps them
    anchor.requires_grad_().register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    anchor.requires_grad_(trains)


def _bit(rows: Tensor) -> Tensor:
    """The bit of each row in its byte of ``seen``."""
    return torch.ones_like(rows, dtype=torch.uint8) << (rows & 7).to(torch.uint8)


def _memory(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for random access: in huge pages where they are to be had. They must be asked for before it is written."""
    made = torch.empty(size, dtype=dtype, device=device)
    if device.type == "cpu":
        _ops.adaptive_table_advise_huge_pages(made)
    return made


def with_rows(values: Tensor, count: int) -> Tensor:
    """The first ``count`` rows of values, in memory of their own; rows that they do not have are zero."""
    made = _memory((count, *values.shape[1:]), values.dtype, values.device)
    kept = min(count, len(values))
    made[:kept] = values[:kept]
    made[kept:] = 0
    return made


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Gives a parameter other values, of which there may be another number."""
    if values.shape != parameter.shape:
        parameter.grad = None
        # Autograd's node that gathers the gradient lives as long as any graph does that holds it, an old loss for
        # instance, and would go on expecting the old shape. A change of dtype makes torch forget it.
        other = torch.float32 if values.dtype == torch.float64 else torch.float64
        parameter.data = values.new_empty(0, dtype=other)
    parameter.data = values


class ChunkStorage(TableWeight):
    """The tensors of a table of which only a budget of chunks is resident.

    On CUDA the pool, the fused optimizer's state, the index and utilities are on the device; the learning rate and the
    count of steps stay on the CPU.
    """

    # Plain tensors, not buffers: DDP would send buffers to all ranks in every forward pass. They are in the state_dict,
    # and go to all ranks once (forward under DDP) and whenever utilities are merged (ChunkPruner).
    trigger: nn.Parameter | None
    index: Tensor

    _PLAIN = ("index", "utility", "sketch", "seen", "clock", "lr")
    _ON_HOST = ("clock", "lr")  # read in every step, so that none waits for a device
    # Which of a whole table a shard is: rank, world and the table's rows; on the CPU.
    shard: Tensor | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        options: TableOptions,
        *,
        device: Any,
        dtype: Any,
    ) -> None:
        nn.Module.__init__(self)  # not nn.EmbeddingBag's, which would make the whole table
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_size(num_embeddings, embedding_dim, dtype)
        device = torch.get_default_device() if device is None else torch.device(device)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        whole = options.budget == 1.0 and isinstance(options.budget, float)
        self.chunk_dim = chunk_dim_of(embedding_dim, options.chunk_dim, whole)
        self.chunks = embedding_dim // self.chunk_dim
        total = num_embeddings * self.chunks
        if total > 2**31 - 1 or self.chunks > 256:
            raise refuse(
                "num_embeddings x chunks",
                (num_embeddings, self.chunks),
                "2^31 - 1 chunks, 256 a row; take a larger chunk_dim or share the rows out (training='sharded')",
            )
        self.budget_chunks = capacity_of(options.budget, total)
        self.training_mode, self.optimizer_name = options.training, options.optimizer
        self.betas, self.eps, self.gamma = options.betas, options.eps, options.gamma
        self.init_std, self.seed = options.init_std, options.seed
        self.layout = layout_of(options.layout, self.budget_chunks, total)
        check_device(device)
        trained = self.training_mode in ("dense", "sparse")
        self._whole = trained and self.layout == "identity"
        pool = _memory((self.budget_chunks, self.chunk_dim), dtype, device)
        # Autograd runs a backward pass only towards something that requires grad.
        trigger = None if trained else nn.Parameter(torch.empty(0, dtype=dtype, device=device))
        if trigger is not None:
            drop_gradients(trigger)
        self._register_values(pool, trigger)
        self._lr = torch.tensor(learning_rate(options.lr), dtype=torch.float64, device="cpu")
        self.reset_parameters()

    @property
    def extent(self) -> Tensor:
        """Rows, and chunks of each: what other sizes do not always tell. On the CPU."""
        return torch.tensor([self.num_embeddings, self.chunks], device="cpu")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Attributes that hold the fused optimizer's state, as state_dict calls them, too."""
        return () if self.trigger is None else ("state0", "state1")[: OPTIMIZERS[self.optimizer_name]]

    @property
    def state(self) -> list[Tensor]:
        """The fused optimizer's state, by slot; empty where another optimizer has it."""
        return [getattr(self, name) for name in self.state_names]

    @state.setter
    def state(self, values: list[Tensor]) -> None:
        for name, value in zip(self.state_names, values, strict=True):
            setattr(self, name, value)

    @property
    def lr(self) -> Tensor:
        """The learning rate of the fused update: one number, float64, on the CPU wherever the table is.

        What is assigned, a number or a tensor of one, is written into the tensor, which param_group() and compiled
        graphs share.
        """
        return self._lr

    @lr.setter
    def lr(self, value: float | Tensor) -> None:
        self._lr.fill_(learning_rate(value))

    def _make_plain(self) -> None:
        rows, total, slots = self.num_embeddings, self.num_embeddings * self.chunks, self.budget_chunks
        device = self.pool.device
        if "index" in self.__dict__:
            written(self.index)  # before another takes its place, as in _resize
        self.clock = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
        self.seen = torch.zeros(0 if self.layout == "identity" else (rows + 7) // 8, dtype=torch.uint8, device=device)
        cells = self._sketch_cells(slots) if self.layout == "sketch" else 0
        self.sketch = torch.full((cells,), -1, dtype=torch.int32, device=device)
        self.index = self._empty_index(slots)
        count, dtype = {
            "identity": (0, torch.float32),
            "direct": (total, torch.float32),
            "hash": (total, torch.uint8),
            "sketch": (slots + cells, torch.uint8),
        }[self.layout]
        self.utility = _memory((count,), dtype, device).zero_()
        self.state = self._empty_state(slots)

    def _empty_index(self, slots: int) -> Tensor:
        device = self.pool.device
        if self.layout == "identity":
            return torch.empty(0, dtype=torch.int32, device=device)
        if self.layout == "direct":
            return _memory((self.num_embeddings * self.chunks,), torch.int32, device).fill_(-1)
        return _memory((self._index_cells(slots),), torch.int64, device).fill_(-1)

    @staticmethod
    def _index_cells(slots: int) -> int:
        """ChunkIndex::cellsFor."""
        return slots + slots * 3 // 7 + 8

    @staticmethod
    def _sketch_cells(slots: int) -> int:
        return max(64, slots // 2)

    def _empty_state(self, slots: int) -> list[Tensor]:
        dtype = torch.float64 if self.pool.dtype == torch.float64 else torch.float32
        shape = (slots,) if self.optimizer_name == "adagrad" else (slots, self.chunk_dim)
        return [_memory(shape, dtype, self.pool.device).zero_() for _ in self.state_names]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Starts over: normal values where everything is resident, else an empty pool that pruning fills.

        Index, utilities, count of steps and the fused optimizer's state begin anew; the learning rate stays.
        """
        self._make_plain()
        if self.layout == "identity":
            self.pool.normal_(0, self.init_std, generator=self._generator())
            self._zero_row(getattr(self, "_frozen", None))  # a shard has rows of its own
        else:
            self.pool.zero_()

    def _generator(self) -> torch.Generator | None:
        """Of initial values: torch's, or one for this shard, as all ranks may have seeded torch's alike."""
        if self.training_mode != "sharded" or self.pool.is_meta:
            return None
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_(2**62))
        return torch.Generator(self.pool.device).manual_seed(drawn + self.seed)

    def _zero_row(self, row: int | None) -> None:
        if row is not None and self.layout == "identity":
            self.pool.detach().view(self.num_embeddings, self.embedding_dim)[row].zero_()

    def _resident(self) -> tuple[Tensor, Tensor]:
        """Keys (rising) and slots of the resident chunks."""
        nothing = self.utility.new_empty(0, dtype=torch.float32)
        keys, slots, _ = _ops.adaptive_table_candidates(
            self.index, nothing, self.sketch.new_empty(0), self.budget_chunks, self.num_embeddings, self.chunks
        )
        return keys, slots

    def _computed(self) -> Tensor:
        made = self.pool.new_zeros(self.num_embeddings * self.chunks, self.chunk_dim)
        if not made.is_meta:  # whose chunks nobody knows
            keys, slots = self._resident()
            made.index_copy_(0, keys, self.pool.detach()[slots])
        return made.view(self.num_embeddings, self.embedding_dim)

    def stats(self) -> dict[str, Any]:
        """What is resident, how wide rows are, and what it costs.

        Returns:
            ``resident_chunks``; ``chunks`` of the whole table; ``width_histogram``: rows by their number of
            resident chunks, from 0; ``value_bytes`` of the pool; ``bytes`` of everything that lives as long as the
            table: values, the fused optimizer's state, index, utilities, bookkeeping; ``dense_value_bytes`` of a
            table with all chunks; ``layout``.
        """
        keys, _ = self._resident()
        widths = torch.bincount(keys.cpu() // self.chunks, minlength=self.num_embeddings)
        tensors = [self.pool, *self.state, *(tensor for _, tensor in self.plain_tensors())]
        return {
            "layout": self.layout,
            "resident_chunks": len(keys),
            "chunks": self.num_embeddings * self.chunks,
            "width_histogram": torch.bincount(widths, minlength=self.chunks + 1).tolist(),
            "value_bytes": self.pool.nbytes,
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "dense_value_bytes": self.num_embeddings * self.embedding_dim * self.pool.element_size(),
        }

    def _fill_index(self, keys: Tensor, slots: Tensor, capacity: int) -> None:
        """Enters chunks, by rising key, into an empty index so that they have just these slots."""
        if self.layout == "direct":
            self.index[keys] = slots.to(torch.int32)
            return
        # The operator gives a table that is filled with useful chunks slots of its own: put their contents in order.
        utility = torch.zeros(self.num_embeddings * self.chunks, dtype=torch.float32, device=keys.device)
        utility[keys] = 1
        none = self.sketch.new_empty(0)
        _ops.adaptive_table_prune_(
            self.index, utility, none, capacity, self.num_embeddings, self.chunks, capacity, capacity, 0.0
        )
        cells = self.index >= 0
        found = self.index[cells] >> 32
        self.index[cells] = found << 32 | slots[torch.searchsorted(keys, found)]

    @torch.no_grad()
    def _take(self, embeddings: Tensor) -> None:
        """Takes over a whole table: everything, or the chunks with the largest norms."""
        if embeddings.shape != (self.num_embeddings, self.embedding_dim):
            expected = (self.num_embeddings, self.embedding_dim)
            raise ValueError(f"embeddings have shape {tuple(embeddings.shape)}; the table is {expected}")
        values = embeddings.detach().to(self.pool).reshape(-1, self.chunk_dim)
        if self.layout == "identity":
            self._make_plain()
            self.pool.copy_(values.view(self.pool.shape))
            return
        self.reset_parameters()
        norms = values.float().norm(dim=1)
        largest = norms.topk(min(self.budget_chunks, len(norms))).indices
        keys = largest[norms[largest] > 0].sort().values
        slots = torch.arange(len(keys), device=keys.device)
        self._fill_index(keys, slots, self.budget_chunks)
        self.pool[: len(keys)] = values[keys]
        rows = torch.unique_consecutive(keys // self.chunks)
        self.seen.index_put_((rows >> 3,), _bit(rows), accumulate=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ChunkStorage:
        before, device = self.pool.device, fn(self.pool.new_empty(0)).device
        check_device(device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.training_mode == "sharded" and self.trigger is not None:
            self.pool.data, self.trigger.data = fn(self.pool.data), fn(self.trigger.data)
        if before.type == "meta" != device.type:  # from where nothing comes: an empty table
            self._make_plain()
            return self
        dtype = torch.float64 if self.pool.dtype == torch.float64 else torch.float32
        self.state = [state.to(device, dtype) for state in self.state]
        for name in self._PLAIN:
            if name not in self._ON_HOST:
                setattr(self, name, getattr(self, name).to(device))
        return self

    def plain_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors of what is neither parameter nor optimizer's state."""
        return ((name, getattr(self, name)) for name in self._PLAIN)

    def _resize(self, slots: int, index: int, utility: int, sketch: int) -> None:
        """Room for so many slots, cells of the index, utilities and cells of a sketch.

        What has another size then has nothing in it.
        """
        written(self.index)  # before another takes its place: passes that have looked it up must notice
        if slots != self.budget_chunks:
            self.budget_chunks = slots
            replace_values(self.pool, _memory((slots, self.chunk_dim), self.pool.dtype, self.pool.device))
            self.state = self._empty_state(slots)
        if index != len(self.index):
            self.index = _memory((index,), self.index.dtype, self.index.device)
        if utility != len(self.utility):
            self.utility = _memory((utility,), self.utility.dtype, self.utility.device)
        if sketch != len(self.sketch):
            self.sketch = self.sketch.new_empty(sketch)
