"""``TableWeight`` decides what a table's values are registered as, and what ``weight`` and ``pool`` are.

A table is *whole* where all its chunks are resident and an optimizer trains them (``training="dense"``, ``"sparse"``):

==============  ================================  ===================================================================
                whole                             else
==============  ================================  ===================================================================
parameters      ``weight``, (rows, columns)       ``pool``, (slots, chunk_dim); ``trigger`` where the update is fused
``pool``        ``weight`` itself                 the parameter; of shards hidden from modules around
``weight``      the parameter                     a :class:`ComputedWeight`
state_dict      ``weight`` alone                  ``pool`` and what belongs to it (``checkpoint.py``)
operators see   one chunk a row, whatever         the pool in chunks
                ``chunk_dim`` says; the
                weight's own size
pruning         nothing to prune                  chunks move in ``pool`` and in the optimizer's state of it
==============  ================================  ===================================================================

So a whole table is nn.EmbeddingBag: whatever torch or a script does with a parameter named weight is done to what the
forward pass reads. It may be replaced, tied, parametrized, or moved by its ``.data``. The forward pass takes it as it
is then; nothing that it says (size, device, dtype) is kept elsewhere.

A fused update has no gradient that could be added to another one. Its weight is a view that may be written, below a
budget of 1.0 a copy that may not; neither takes part in a loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchext.nn.computed_weight import ComputedWeight, refusal

__all__ = ["TableWeight"]


class TableWeight(nn.Module):
    """The parameters of a table."""

    if TYPE_CHECKING:
        num_embeddings: int
        embedding_dim: int
        chunks: int
        layout: str
        training_mode: str

    _whole = False  # whether weight is a parameter; tables pickled before there was one have none

    def _register_values(self, pool: Tensor, trigger: nn.Parameter | None) -> None:
        """Makes parameters of the pool, (slots, chunk_dim)."""
        if self._whole:
            self.weight = nn.Parameter(pool.view(self.num_embeddings, self.embedding_dim))
            self.trigger = None
        elif self.training_mode == "sharded":  # not registered: DDP would give every rank the shard of rank 0
            self.__dict__.update(pool=nn.Parameter(pool, requires_grad=False), trigger=trigger)
        else:
            self.register_parameter("pool", nn.Parameter(pool, requires_grad=trigger is None))
            self.trigger = trigger

    @property
    def pool(self) -> nn.Parameter:
        """The values of resident chunks, (slots, chunk_dim); of a table that is all there and unfused its weight."""
        if self._whole:
            return self.weight  # type: ignore[return-value]
        made = self._parameters.get("pool")
        if made is None:
            made = self.__dict__.get("pool")
        if made is None:
            raise AttributeError("pool")
        return made

    @property
    def weight(self) -> Tensor:
        """The table as nn.EmbeddingBag would have it, (num_embeddings, embedding_dim), zeros where chunks are absent.

        With ``budget=1.0`` and ``training="dense"`` or ``"sparse"`` it is nn.EmbeddingBag's: a parameter. Otherwise it
        is to be read, and what cannot reach the table raises RuntimeError: freezing it, a gradient of it, an optimizer
        of it. Of a fused table with ``budget=1.0`` and of shards it is a view into which values may be written. Below
        it is made anew at each access, and writing raises, too. Values come in by ``load_state_dict({"weight":
        values})`` or ``from_pretrained``, which keep the chunks with the largest norms; later chunks start as
        ``init_std`` says.
        """
        own = self._parameters.get("weight")
        if own is None:
            own = self.__dict__.get("weight")  # torch.nn.utils.prune and weight_norm put what they compute in its place
        if own is not None:
            return own
        if self._whole or "layout" not in self.__dict__:
            raise AttributeError("weight")
        whole = self.layout == "identity"
        values = self.pool.detach().view(self.num_embeddings, self.embedding_dim) if whole else self._computed()
        if not whole and torch.compiler.is_compiling():  # where the subclass cannot be followed
            if torch.is_grad_enabled():
                raise refusal("is asked for a gradient", "read it under torch.no_grad() in what is compiled")
            return values
        return ComputedWeight.of(values, self._instead(), lent=not whole)

    @weight.setter
    def weight(self, value: Any) -> None:  # parameters go to register_parameter
        if not self._whole:
            raise refusal("is set", self._instead())
        self.__dict__["weight"] = value

    @weight.deleter
    def weight(self) -> None:  # as before
        if "weight" not in self.__dict__:
            raise AttributeError("weight")
        del self.__dict__["weight"]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's; refuses a weight where it would not be the table's."""
        if name == "weight" and not self._whole:
            raise refusal("is replaced by a parameter", self._instead())
        super().register_parameter("weight" if name == "pool" and self._whole else name, param)

    def _instead(self) -> str:
        if self.training_mode in ("dense", "sparse"):
            return "take budget = 1.0, of which weight is a parameter"
        return "take training = 'dense' or 'sparse' with budget = 1.0, of which weight is a parameter"

    def _computed(self) -> Tensor:
        """The table from its resident chunks."""
        raise NotImplementedError

    def _cut(self, pool: Tensor) -> tuple[int, int]:
        """Rows, and chunks of each, as the operators see the pool."""
        return (pool.shape[0], 1) if self._whole else (self.num_embeddings, self.chunks)
