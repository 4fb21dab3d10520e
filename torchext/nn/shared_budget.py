"""A budget that several tables have together: what of it is this rank's, and how its tables share that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchext.nn.operators import _ops
from torchext.nn.table_options import check_int

if TYPE_CHECKING:
    from torchext.nn.adaptive_table import AdaptiveTable

__all__ = ["part_of_rank", "shares"]


def _chunks(table: AdaptiveTable) -> int:
    """Of the table on this rank."""
    return table.num_embeddings * table.chunks


def part_of_rank(tables: Sequence[AdaptiveTable], budget: int) -> int:
    """How many chunks this rank's tables have together: all of the budget, or of shards a part by their rows.

    Raises:
        ValueError: A budget that the tables cannot have, or tables that cannot share one.
        TypeError: It is no int.
    """
    if not tables:  # shards that are wholly resident here, if perhaps not elsewhere
        check_int("shared_budget", budget, "or None")
        return budget
    if len({table.shard is None for table in tables}) > 1:
        raise ValueError(
            f"shared_budget = {budget}: allowed for shards or for replicas, and these are both; a rank decides for its "
            "shards alone, but for replicas as the others do. Make a ChunkPruner for each kind"
        )
    least = sum(1 if table.shard is None else int(table.shard[1]) for table in tables)  # each keeps a slot
    most = sum(_chunks(table) if table.shard is None else int(table.shard[2]) * table.chunks for table in tables)
    check_int("shared_budget", budget, f"{least}..{most} chunks, or None")
    if not least <= budget <= most:
        raise ValueError(f"shared_budget = {budget}: allowed {least}..{most} chunks")
    widths = {table.chunk_dim for table in tables}
    if len(widths) > 1:
        raise ValueError(f"shared_budget needs tables with one chunk_dim, found {sorted(widths)}")
    return max(len(tables), budget * sum(map(_chunks, tables)) // most)


def shares(tables: Sequence[AdaptiveTable], budget: int) -> list[int]:
    """Slots of each table: the most useful chunks of all, each relative to its table's 95th percentile."""
    if not tables:
        return []
    scaled: list[Tensor] = []
    for table in tables:
        _, _, utilities = _ops.adaptive_table_candidates(
            table.index, table.utility, table.sketch, table.budget_chunks, table.num_embeddings, table.chunks
        )
        used = utilities[utilities > 0]
        high = used.sort().values[int(0.95 * (len(used) - 1))] if len(used) else utilities.new_ones(())
        scaled.append((used / high).cpu())
    owner = torch.cat([torch.full((len(part),), at, device="cpu") for at, part in enumerate(scaled)])
    chosen = torch.cat(scaled).sort(descending=True, stable=True).indices[:budget]
    counts = torch.bincount(owner[chosen], minlength=len(tables)).clamp(min=1)
    most = torch.tensor([_chunks(table) for table in tables], device="cpu")
    spare = budget - int(counts.sum())
    for at in torch.argsort(most - counts, descending=True, stable=True).tolist():
        given = max(-int(counts[at]) + 1, min(spare, int(most[at] - counts[at])))
        counts[at] += given
        spare -= given
    return [int(count) for count in counts]
