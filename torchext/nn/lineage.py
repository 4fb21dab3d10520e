"""Lineage says whether slots of a copied table still mean the same chunks as in the table it was made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torchext.nn.adaptive_table import AdaptiveTable

__all__ = ["Copied", "Origin", "Prunings"]


class Prunings:
    """How often chunks of a table have changed their slots."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        return Copied(self, self.count)


class Copied(NamedTuple):
    """Stands in a deep copy for the prunings of the table that was copied."""

    prunings: Prunings
    at: int  # its count then


class Origin(NamedTuple):
    """The table that a copy was made of, and what the copy held when it last wrote its pool itself."""

    copied: Copied
    version: int  # of the copy's pool
    clock: float  # steps that the copy has observed

    @classmethod
    def of(cls, copy: AdaptiveTable, copied: Copied) -> Origin | None:
        """As of now."""
        # Tensors of inference mode know no versions.
        return None if copy.pool.is_inference() else cls(copied, copy.pool._version, float(copy.clock[0]))

    def check(self, copy: AdaptiveTable) -> None:
        """Refuses values that came slot by slot from a table whose slots have other chunks by now.

        A copy that trains is a table of its own; one that has observed nothing has not written its pool itself.
        """
        if torch.compiler.is_compiling() or self.copied.prunings.count == self.copied.at:
            return
        if copy.pool._version != self.version and float(copy.clock[0]) == self.clock:
            raise RuntimeError(
                "values of this copy of a table were written from outside, as torch.optim.swa_utils.AveragedModel "
                "writes averages, and the table that it was copied from has been pruned since: its slots hold other "
                "chunks than the copy's. Begin such an average when pruning has ended, or anew after each pruning "
                "(whenever ChunkPruner.step() does not return None); load_state_dict makes the copy a table of its own"
            )
