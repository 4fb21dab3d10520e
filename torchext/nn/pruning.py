"""A pruner decides when tables are pruned, by what they know together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchext.base.plain import plain
from torchext.nn.adaptive_table import AdaptiveTable
from torchext.nn.averaged_tables import averaging, check_prunable, group_of
from torchext.nn.optimizer_hooks import check_optimizer, moving_state
from torchext.nn.shared_budget import part_of_rank, shares
from torchext.nn.table_options import check_hysteresis, check_int, check_number, refuse

__all__ = ["ChunkPruner"]


def _modules(modules: Any) -> list[nn.Module]:
    if isinstance(modules, nn.Module):
        return [modules]
    found = list(modules) if isinstance(modules, Iterable) else [modules]
    for module in found:
        if not isinstance(module, nn.Module):
            raise TypeError(f"modules: {module!r} is a {type(module).__name__}; give a torch.nn.Module, or several")
    return found


def _check_count(name: str, value: Any, least: int, allowed: str) -> None:
    check_int(name, value, allowed)
    if value < least:
        raise refuse(name, value, allowed)


class ChunkPruner:
    """Prunes the adaptive embeddings of a model on a schedule: early and often, later rarely (FIITED, section 3.2).

    ::

        pruner = ChunkPruner(model, optimizer=optimizer)
        for batch in data:
            ...
            optimizer.step()
            pruner.step()

    Data-parallel replicas (``training="sparse"`` or ``"dense"`` in a process group) first merge what they have
    observed, so that all of them decide alike: ``step`` is collective on the steps that prune. Shards decide each for
    its own rows.

    Where ``torchext.attach`` averages the replicas (``prague``, ``dssync``, ``hop``), ``step`` makes them the same
    before it prunes, as ``Synchronizer.synchronize`` does, so that no average brings back what a slot held before. All
    workers meet there: each makes as many steps, without ``on_peer_failure="continue"`` and without ``max_jump``.

    Args:
        modules: A model, or several modules; every AdaptiveEmbedding(Bag) in them is pruned.
        optimizer: Whose state of a pool moves with the chunks, also while the pool is frozen. Needed when an optimizer
            trains the pools; looked at again in each pruning, as pools may be thawed.
        first: Steps until the first pruning, 1 or more.
        growth: Factor by which the interval grows, 1 or more.
        interval: Longest interval in steps, ``first`` or more.
        max_swap_share: Chunks exchanged at once, as a share of the pool, 0 < share <= 1; free slots are filled besides.
        hysteresis: A resident chunk counts (1 + hysteresis) times its utility, 0 or more.
        shared_budget: Chunks that all tables have together, or None: each its own. Pools then grow and shrink;
            utilities count relative to the 95th percentile of their table. All tables need one chunk_dim. Of shards
            the whole tables' chunks: each rank has a part by its rows, and at least a chunk of each table. Not for
            shards and replicas together, nor for tables with ``training="dense"`` or ``"sparse"`` inside
            DistributedDataParallel, whose buckets keep their size.
        process_group: Of the replicas; None: that of an attached model whose replicas are averaged, else that of the
            DistributedDataParallel around a table, else the default group, if there is one. Not for shards alone.

    Raises:
        ValueError: An argument out of its range, no table to prune, or an optimizer that does not train a pool. A
            shared budget in DDP that was not among the modules, optimizer state that cannot move (that of "dear" in its
            sharded form), and a model attached later whose workers do not meet: from :meth:`prune`.
        RuntimeError: Replicas hold other chunks, or have made other numbers of steps: from :meth:`prune`.
        TypeError: An argument of a wrong type.
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        first: int = 16,
        growth: float = 2.0,
        interval: int = 500,
        max_swap_share: float = 0.1,
        hysteresis: float = 0.1,
        shared_budget: int | None = None,
        process_group: Any = None,
    ) -> None:
        found = _modules(modules)
        modules_within = [part for module in found for part in module.modules()]
        tables = list(dict.fromkeys(part for part in modules_within if isinstance(part, AdaptiveTable)))
        self.tables = [table for table in tables if table.layout != "identity"]
        # Among all of them, or a shard that is wholly resident on some rank would move the replicas behind it there.
        self._positions = [at for at, table in enumerate(tables) if table.layout != "identity"]
        # Of a budget below 1.0 a rank's few rows may all be resident, while those of others are pruned.
        if not self.tables and not any(table.training_mode == "sharded" for table in tables):
            raise ValueError(
                "modules: no AdaptiveEmbedding or AdaptiveEmbeddingBag with a budget below 1.0 in them; tables with "
                "budget 1.0 keep everything and need no ChunkPruner"
            )
        if process_group is not None and all(table.training_mode == "sharded" for table in tables):
            raise ValueError(
                f"process_group = {process_group!r}: allowed for replicas, and all tables are shards, each of which is "
                "pruned by itself; leave it out"
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer = {optimizer!r} is a {type(optimizer).__name__}; it must be the torch.optim.Optimizer that "
                "trains the pools, or None"
            )
        first, growth, interval, max_swap_share, hysteresis, shared_budget = map(
            plain, (first, growth, interval, max_swap_share, hysteresis, shared_budget)
        )
        _check_count("first", first, 1, "1 or more")
        check_number("growth", growth, lambda value: 1 <= value < float("inf"), "1 or more, finite")
        _check_count("interval", interval, first, f"first = {first} or more")
        check_number("max_swap_share", max_swap_share, lambda value: 0 < value <= 1, "0 < share <= 1")
        check_hysteresis(hysteresis)
        if shared_budget is not None:
            self._budget = part_of_rank(self.tables, shared_budget)
            if any(isinstance(part, DistributedDataParallel) for module in found for part in module.modules()):
                self._refuse_ddp(self.tables)
        check_prunable(self.tables, process_group)
        self.optimizer, self.process_group, self.shared_budget = optimizer, process_group, shared_budget
        self.growth, self.interval = growth, interval
        self.max_swap_share, self.hysteresis = max_swap_share, hysteresis
        self._steps, self._next, self._wait = 0, first, float(first)
        for table in self.tables:
            check_optimizer(self.optimizer, table)

    def _refuse_ddp(self, tables: Iterable[AdaptiveTable]) -> None:
        if any(table.optimizer_trains for table in tables):
            raise ValueError(
                "shared_budget inside DistributedDataParallel: pools with training='dense' or 'sparse' would change "
                "their size, and DDP's buckets keep theirs. Leave shared_budget out, or take training='sharded'."
            )

    def step(self) -> dict[str, int] | None:
        """Call once a training step, after ``optimizer.step()``. Returns what a pruning did, None without one."""
        self._steps += 1
        if self._steps < self._next:
            return None
        self._wait = min(float(self.interval), self._wait * self.growth)
        self._next = self._steps + max(1, round(self._wait))
        return self.prune()

    @torch.no_grad()
    def prune(self) -> dict[str, int]:
        """Prunes now. Collective among replicas; those of an attached model are averaged first."""
        check_prunable(self.tables, self.process_group)  # a model may be attached after its pruner was made
        if self.shared_budget is not None:
            self._refuse_ddp(table for table in self.tables if table._ddp is not None or averaging([table]))
        for table in self.tables:  # or none of them is pruned
            check_optimizer(self.optimizer, table)  # it may have been frozen until now
            moving_state(self.optimizer, table)
        # An average under way has chunks where they were before. All are finished then, and none begins until the next
        # step.
        for synchronizer in averaging(self.tables):
            synchronizer.synchronize()
        for table in self.tables:
            if table.training_mode != "sharded":
                self._merge(table)
        sizes = [table.budget_chunks for table in self.tables]
        if self.shared_budget is not None:
            sizes = shares(self.tables, self._budget)
        done = {"admitted": 0, "dropped": 0, "moved": 0}
        for table, position, size in zip(self.tables, self._positions, sizes, strict=True):
            result = table._prune(
                optimizer=self.optimizer,
                max_swaps=max(1, round(self.max_swap_share * size)),
                hysteresis=self.hysteresis,
                capacity=size,
                position=position,
            )
            done = {key: value + result[key] for key, value in done.items()}
        return done

    def _merge(self, table: AdaptiveTable) -> None:
        """Makes utilities what all replicas have observed together, and sure that they hold the same chunks."""
        group = group_of(table, self.process_group)
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        world = dist.get_world_size(group)
        index = table.index.to(torch.int64)
        odd = torch.arange(1, 2 * len(index), 2, device=index.device)
        mark = index.new_tensor([0, table.budget_chunks, int(table.clock[0])])
        mark[0] = (index * odd).sum()
        marks = [torch.empty_like(mark) for _ in range(world)]
        dist.all_gather(marks, mark, group=group)
        for rank, other in enumerate(marks):
            if not torch.equal(other, marks[0]):
                raise RuntimeError(
                    f"replicas differ: rank {rank} has other chunks or steps (checksum, slots, steps {other.tolist()}) "
                    f"than rank 0 ({marks[0].tolist()}). Load checkpoints on every rank, and train all of them equally."
                )
        if table.utility.dtype == torch.float32:
            dist.all_reduce(table.utility, group=group)
            table.utility.div_(world)
            return
        cells = len(table.sketch)
        resident = table.utility[: len(table.utility) - cells]
        dist.all_reduce(resident, op=dist.ReduceOp.MAX, group=group)
        if cells:
            # Of the chunks that fell on a cell somewhere, the most useful one gets it; the smaller key among equals.
            held = table.utility[-cells:].to(torch.int64) << 32 | (2**31 - 1 - table.sketch.to(torch.int64))
            held[table.sketch < 0] = -1
            dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
            table.utility[-cells:] = (held >> 32).clamp(min=0).to(torch.uint8)
            table.sketch.copy_(torch.where(held < 0, -1, 2**31 - 1 - (held & 0xFFFFFFFF)))

    def state_dict(self) -> dict[str, float]:
        """The position in the schedule."""
        return {"steps": self._steps, "next": self._next, "wait": self._wait}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where :meth:`state_dict` was taken.

        Raises:
            TypeError, ValueError: It is no such state; names the key. Nothing of it is taken then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is a {type(state).__name__}; it must be what ChunkPruner.state_dict() returned")
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise ValueError(f"state lacks {missing}; it must be what ChunkPruner.state_dict() returned")
        _check_count("state['steps']", state["steps"], 0, "0 or more")
        _check_count("state['next']", state["next"], 1, "1 or more")
        check_number("state['wait']", state["wait"], lambda value: 1 <= value < float("inf"), "1 or more, finite")
        self._steps, self._next, self._wait = int(state["steps"]), int(state["next"]), float(state["wait"])
