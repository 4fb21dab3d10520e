"""Tables of models whose replicas an attached backend averages: where all workers can prune them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torchext import _C
from torchext.backends import backend_of
from torchext.ddp.synchronizer import active_synchronizers
from torchext.decentralized.averaging_synchronizer import AveragingSynchronizer

if TYPE_CHECKING:
    from torchext.nn.adaptive_table import AdaptiveTable

__all__ = ["averaging", "check_prunable", "group_of"]


def averaging(tables: Iterable[AdaptiveTable]) -> list[AveragingSynchronizer]:
    """What averages the replicas of models that have one of the tables, in the order of attaching."""
    wanted = {id(table) for table in tables if table.training_mode != "sharded"}
    return [
        synchronizer
        for synchronizer in active_synchronizers()
        if isinstance(synchronizer, AveragingSynchronizer)
        and any(id(module) in wanted for module in synchronizer._ddp.module.modules())
    ]


def check_prunable(tables: Iterable[AdaptiveTable], process_group: Any) -> None:
    """Refuses models whose workers do not come to a pruning together.

    Raises:
        ValueError: Named with the way out.
    """
    for synchronizer in averaging(tables):
        if synchronizer._continues():
            raise ValueError(
                "on_peer_failure = 'continue' of torchext.attach: a worker that is lost or let in while tables are "
                "pruned would leave replicas with different chunks; with a ChunkPruner allowed is 'raise' (torchrun "
                "--max-restarts goes on from a checkpoint)"
            )
        backend = backend_of(synchronizer._ddp.process_group)
        if isinstance(backend, _C.ProcessGroupHop) and (jump := backend.options.max_jump):
            raise ValueError(
                f"HopOptions.max_jump = {jump}: workers that skip iterations have observed other numbers of steps, "
                "and tables are pruned by what all have observed; with a ChunkPruner allowed is 0"
            )
        if process_group is not None and process_group is not synchronizer._ddp.process_group:
            raise ValueError(
                f"process_group = {process_group!r}: the model of the tables is attached in another, whose replicas "
                "must decide alike; leave it out"
            )


def group_of(table: AdaptiveTable, process_group: Any) -> Any:
    """Whose replicas of the table decide alike: those that are averaged, else those of the process group given.

    Without one those of the DDP that has met the table; None: the default group.
    """
    found = averaging([table])
    if found:
        return found[0]._ddp.process_group
    return table._ddp if process_group is None else process_group
