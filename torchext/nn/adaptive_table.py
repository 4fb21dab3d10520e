"""An adaptive table, of which a budget of chunks is resident, trains, prunes, meets DDP, is saved and copied."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchext.base.eager_only import eager_only
from torchext.base.plain import plain
from torchext.nn.averaged_tables import averaging
from torchext.nn.checkpoint import VERSION, load_table, unregistered_tensors, with_weight
from torchext.nn.chunk_storage import ChunkStorage, drop_gradients, replace_values, with_rows
from torchext.nn.lineage import Copied, Origin, Prunings
from torchext.nn.operators import BagSpec, Table, _ops, written
from torchext.nn.optimizer_hooks import expect_other_size, moving_state, track_optimizer_lr
from torchext.nn.table_options import MODES, TableOptions, check_hysteresis, check_int, mixed_seed, refuse

if TYPE_CHECKING:
    from typing import Self

__all__ = ["AdaptiveTable"]


class AdaptiveTable(ChunkStorage):
    """What :class:`AdaptiveEmbeddingBag` and :class:`AdaptiveEmbedding` have in common.

    Attributes:
        weight: Parameter, (num_embeddings, embedding_dim), of a whole table; otherwise computed (``table_weight.py``).
        pool: Parameter, (slots, chunk_dim): the values of resident chunks; of a whole table weight itself. Trained by
            an optimizer of yours unless training is fused or sharded.
        lr: Tensor of one number, float64, on the CPU wherever the table is: the learning rate of the fused update. A
            number that is assigned is written into it.
        budget_chunks: Slots of the pool.

    On CUDA pruning fetches index and utilities, decides on the CPU, and sends the index back.
    """

    _version = VERSION
    _origin: Origin | None  # of a copy, as long as its values may come from there
    _grouped = False  # whether an optimizer may have its group
    _met: weakref.ref[DistributedDataParallel] | None = None  # the last DDP that has met the table

    def __init__(
        self, num_embeddings: int, embedding_dim: int, options: TableOptions, *, device: Any, dtype: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, options, device=device, dtype=dtype)
        self._ddp: Any = None  # the process group of that
        self._prunings, self._origin = Prunings(), None

    @property
    def _trained(self) -> Tensor:
        """What requires a gradient as long as the table is not frozen."""
        return self.pool if self.trigger is None else self.trigger

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Thaws or freezes the table. A model around shards does not reach them: freeze them by this, on all ranks."""
        if self._whole:  # and what a parametrization has put in the weight's place
            return super().requires_grad_(requires_grad)
        self._trained.requires_grad_(requires_grad)
        return self

    @property
    def optimizer_trains(self) -> bool:
        """Whether the pool gets a gradient, for an optimizer; a fused update may be thawed with a model around it."""
        return self.trigger is None and self.pool.requires_grad

    @property
    def _table(self) -> Table:
        return Table(self.index, self.utility, self.sketch, self.clock, self.lr, self.state)

    def _spec(
        self, pool: Tensor, mode: str, padding: int | None, frozen: int | None, last: bool, by_frequency: bool
    ) -> BagSpec:
        if mode not in MODES:
            raise refuse("mode", mode, "'sum', 'mean', 'max'")
        return BagSpec(
            *self._cut(pool),
            MODES[mode],
            -1 if padding is None else padding,
            -1 if frozen is None else frozen,
            last,
            by_frequency,
            self.gamma,
            self.training_mode,
            self.optimizer_name,
            *self.betas,
            self.eps,
        )

    def param_group(self) -> dict[str, Any]:
        """A parameter group for any torch optimizer, through which learning-rate schedulers reach the fused update.

        The group has no parameter with a gradient; its "lr" is :attr:`lr`, which schedulers write in place. What is put
        there instead, by the optimizer's load_state_dict or as a number, is taken over in the optimizer's next step:
        updates of backward passes before it still use the old one.
        """
        if self.trigger is None:
            raise ValueError(f"training = {self.training_mode!r} has no fused update; give the optimizer parameters()")
        self._grouped = True
        track_optimizer_lr(self)
        return {"params": [self.trigger], "lr": self.lr}

    @torch.no_grad()
    def prune(
        self,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        max_swaps: int | None = None,
        hysteresis: float = 0.0,
        capacity: int | None = None,
    ) -> dict[str, int]:
        """Lets the most useful chunks in and the least useful out (section 3.2); between steps, never inside one.

        The backward pass of what was looked up before raises RuntimeError, and writes nothing.

        Admitted chunks start with zeros and without optimizer state; those of rows that never had a chunk with normal
        values.

        Args:
            optimizer: Whose state for :attr:`pool` moves with the chunks; needed when one trains the pool.
            max_swaps: Chunks that may be exchanged at once besides filling free slots; None: any number.
            hysteresis: A resident chunk counts (1 + hysteresis) times its utility, 0 or more.
            capacity: Slots of the pool afterwards; None: as many as before.

        Returns:
            Numbers of chunks ``admitted``, ``dropped`` and ``moved``.

        Replicas decide alike only through a :class:`ChunkPruner`, which merges what they have observed. To prune one
        for itself after training, prune a copy (:func:`copy.deepcopy`).

        Raises:
            ValueError: An argument out of its range, or an optimizer that trains something else or whose state cannot
                move with the chunks. Nothing is changed.
            TypeError: An argument of a wrong type. Nothing is changed.
            RuntimeError: Replicas of the table are averaged (``torchext.attach``), or their gradients are
                (DistributedDataParallel). Nothing is changed.
        """
        if averaging([self]):
            raise RuntimeError(
                "prune() of a table whose replicas an attached backend averages: each would hold other chunks than the "
                "ones that it is averaged with. Take ChunkPruner.prune() on all ranks"
            )
        if self._has_replicas():
            raise RuntimeError(
                "prune() of a table inside DistributedDataParallel: each replica has observed its own batches and "
                "would hold other chunks, while their gradients are averaged slot by slot. Take ChunkPruner.prune() on "
                "all ranks, or prune a copy of the table (copy.deepcopy)"
            )
        max_swaps, hysteresis, capacity = map(plain, (max_swaps, hysteresis, capacity))
        return self._prune(optimizer=optimizer, max_swaps=max_swaps, hysteresis=hysteresis, capacity=capacity)

    def _prune(
        self,
        *,
        optimizer: torch.optim.Optimizer | None,
        max_swaps: int | None,
        hysteresis: float,
        capacity: int | None,
        position: int = 0,
    ) -> dict[str, int]:
        """As prune(), whatever replicas there are; ``position`` among the tables that are pruned together.

        Tables of one seed get other initial values in each, and replicas the same.
        """
        total, slots = self.num_embeddings * self.chunks, self.budget_chunks
        capacity = slots if capacity is None else capacity
        # Everything, before anything grows.
        max_swaps = total if max_swaps is None else max_swaps
        check_int("max_swaps", max_swaps, "0 or more, or None")
        if max_swaps < 0:
            raise refuse("max_swaps", max_swaps, "0 or more, or None")
        check_hysteresis(hysteresis)
        check_int("capacity", capacity, f"0..{total}, or None")
        if not 0 <= capacity <= total:
            raise refuse("capacity", capacity, f"0..{total}")
        if self.layout == "identity":
            if capacity != slots:
                raise refuse("capacity", capacity, f"{slots}: a table with budget 1.0 keeps everything")
            return {"admitted": 0, "dropped": 0, "moved": 0}
        if capacity != slots and self._ddp is not None and self.optimizer_trains:
            raise refuse("capacity", capacity, f"{slots} inside DistributedDataParallel, whose buckets keep their size")
        state = moving_state(optimizer, self)
        written(self.index)  # before another takes its place, as in _resize
        if capacity > slots:
            self._grow_index(capacity)
        moves, admitted, dropped = _ops.adaptive_table_prune_(
            self.index,
            self.utility,
            self.sketch,
            max(slots, capacity),
            self.num_embeddings,
            self.chunks,
            capacity,
            min(max_swaps, total),
            hysteresis,
        )
        if capacity < slots and self.layout == "sketch":
            self.utility = torch.cat([self.utility[:capacity], self.utility[slots:]])
        self._carry(moves, admitted, capacity, position, *state)
        self._prunings.count += 1
        self._origin = None
        self.budget_chunks = capacity
        if capacity != slots and self.trigger is None:
            expect_other_size(self)
        return {"admitted": len(admitted), "dropped": len(dropped), "moved": len(moves)}

    def _grow_index(self, capacity: int) -> None:
        """Room for more slots in what is sized by them."""
        if self.layout == "sketch":
            cells = len(self.sketch)
            more = self.utility.new_zeros(capacity - self.budget_chunks)
            self.utility = torch.cat([self.utility[:-cells], more, self.utility[-cells:]])
        if self.layout != "direct" and self._index_cells(capacity) > len(self.index):
            keys, slots = self._resident()
            self.index = self._empty_index(capacity)
            self._fill_index(keys, slots, capacity)

    def _carry(
        self,
        moves: Tensor,
        admitted: Tensor,
        capacity: int,
        position: int,
        state: dict[str, Any],
        moving: Mapping[str, float],
    ) -> None:
        """Moves values and state with their chunks; ``moving`` names which of ``state``, and what it begins with."""

        def carried(values: Tensor, beginning: float = 0.0) -> Tensor:
            values = with_rows(values, capacity) if capacity > len(values) else values.contiguous()
            _ops.adaptive_table_carry_(values, moves, admitted)
            if beginning:
                values[admitted[:, 1]] = beginning
            return with_rows(values, capacity) if capacity < len(values) else values

        replace_values(self.pool, carried(self.pool.data))
        self.state = [carried(own) for own in self.state]
        for name, beginning in moving.items():
            value = state[name]  # sparse is SGD's momentum of sparse gradients
            moved = carried(value.to_dense() if value.is_sparse else value, beginning)
            state[name] = moved.to_sparse(1) if value.is_sparse else moved
        self.pool.grad = None  # its slots may be others' now
        fresh = _ops.adaptive_table_meet_(self.seen, admitted, self.chunks)
        if len(fresh) and self.init_std > 0:
            rank = 0 if self.shard is None else int(self.shard[0])
            # What is admitted, too: a table can be pruned twice in a step.
            chosen = (int(self.clock[0]), int(admitted[:, 0].sum()))
            seed = mixed_seed(self.seed, rank, position, self.num_embeddings, self.embedding_dim, *chosen)
            # On the CPU, so that a row begins with the same values on every device.
            generator = torch.Generator("cpu").manual_seed(seed)
            values = torch.randn(len(fresh), self.chunk_dim, generator=generator, device="cpu") * self.init_std
            self.pool.data[fresh] = values.to(self.pool)
        written(self.pool)

    def _has_replicas(self) -> bool:
        """Whether DDP has averaged gradients of other ranks' replicas with this one's, slot by slot."""
        return self._ddp is not None and self._ddp.size() > 1 and self.layout != "identity"

    def _strange_to_ddp(self) -> bool:
        """Whether this forward pass runs inside a DDP that has not met the table; torch.compile guards the answer."""
        ddp = DistributedDataParallel._active_ddp_module
        # Not the group: what is wrapped again may have been loaded since, by rank 0 alone.
        return ddp is not None and self.training_mode != "sharded" and (self._met is None or self._met() is not ddp)

    @eager_only(
        "a table meets DDP once and not compiled; with fullgraph=True run one forward pass in DDP before compiling"
    )
    def _meet_ddp(self) -> None:
        """Refuses what plain DDP would let diverge, and makes the ranks begin with rank 0's table."""
        ddp = DistributedDataParallel._active_ddp_module
        assert ddp is not None
        if self.training_mode == "fused":
            raise RuntimeError(
                "training = 'fused' inside DistributedDataParallel: every rank would update its own replica with its "
                "own gradients, and the replicas would differ from then on without an error. Use training='sparse' "
                "with an optimizer (DDP on Gloo averages it), or training='sharded', which exchanges rows."
            )
        before = self.index.clone()
        # A whole table is its parameters, and DDP has sent those: nothing may wait here for a rank that does not use
        # the table in this pass.
        for name in () if self.layout == "identity" else self._PLAIN:
            tensor = getattr(self, name)
            sent = tensor.to(self.pool.device)  # what is on the CPU cannot travel where the table does
            torch.distributed.broadcast(sent, group_src=0, group=ddp.process_group)
            if sent is not tensor:
                tensor.copy_(sent)
        if not torch.equal(self.index, before):
            written(self.index)
        self._ddp, self._met = ddp.process_group, weakref.ref(ddp)
        self._origin = None

    def reset_parameters(self) -> None:
        """Starts over: normal values where everything is resident, else an empty pool that pruning fills.

        Index, utilities, count of steps and the fused optimizer's state begin anew; the learning rate stays.
        """
        super().reset_parameters()
        self._origin = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles know no process group."""
        return {**self.__dict__, "_ddp": None, "_met": None, "_origin": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where the table's group may be in an optimizer, the copy's may be in a copy of that."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in ("clock", "_lr", "shard"):  # torch.load(map_location="cuda") has moved them
            if (tensor := self.__dict__.get(name)) is not None and tensor.is_cuda:
                self.__dict__[name] = tensor.cpu()
        copied: Any = self._prunings
        if isinstance(copied, Copied):
            self._prunings, self._origin = Prunings(), Origin.of(self, copied)
        if self._grouped:
            track_optimizer_lr(self)
        if self.trigger is not None:  # hooks are not copied
            drop_gradients(self.trigger)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in unregistered_tensors(self):
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self._whole:  # a weight as nn.EmbeddingBag's
            renamed = with_weight(self, state_dict, prefix, error_msgs)
            given = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
            if renamed is not None:
                super()._load_from_state_dict(renamed, prefix, *given)
            return
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        version = local_metadata.get("version", VERSION)
        load_table(self, state_dict, prefix, version, strict, missing_keys, unexpected_keys, error_msgs)
        self._origin = None
