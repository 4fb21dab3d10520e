"""K-FAC beside models that are attached: what cannot train together, and what works instead."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchext.ddp.attach_checks import before_averaging, before_dear
from torchext.ddp.synchronizer import active_synchronizers
from torchext.dear.dear_synchronizer import DearSynchronizer

if TYPE_CHECKING:
    from torchext.optim.preconditioner import KFACPreconditioner

__all__ = ["dear_of", "living", "refusal_of_dear"]

# All that have not been removed.
living: weakref.WeakSet[KFACPreconditioner] = weakref.WeakSet()


def _on(model: nn.Module) -> list[KFACPreconditioner]:
    """Those that precondition some of the model's gradients."""
    parameters = {id(parameter) for parameter in model.parameters()}

    def find() -> list[KFACPreconditioner]:
        return [kfac for kfac in list(living) if kfac._preconditions(parameters)]

    if find():
        gc.collect()  # those that are gone may wait in cycles
    return find()


def _check_averaging(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises for K-FAC whose ranks exchange factors, in or in front of this optimizer of the model."""
    if any(kfac._several for kfac in _on(model) if kfac._belongs_to(optimizer)):
        raise ValueError(
            "torchext.attach: K-FAC exchanges factors with all ranks in its steps, and wants the average gradient; "
            "decentralized workers step at their own pace with their own. Train it with plain DDP, or with dear as "
            "KFACPreconditioner(model, optimizer) and DeAROptions(form='replicated'), or keep its factors to each "
            "worker: process_group=dist.new_group([rank], use_local_synchronization=True)"
        )


def _check_dear(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> None:
    """Raises for K-FAC on a model that this form of "dear" is to train. Local."""
    for kfac in _on(model):
        inside = kfac._inside if kfac._belongs_to(optimizer) else None
        refusal = refusal_of_dear(inside, form == "sharded")
        if refusal is not None:
            raise refusal


def refusal_of_dear(inside: str | None, sharded: bool) -> Exception | None:
    """What to raise for K-FAC under "dear".

    Args:
        inside: the optimizer that K-FAC is a part of; None: it stands in front of one.
        sharded: the form.
    """
    way = (
        "put KFACPreconditioner(model, optimizer) in front of an optimizer of torch.optim, with "
        "DeAROptions(form='replicated'), or train with plain DDP"
    )
    if sharded:
        return ValueError(
            f"{inside or 'KFACPreconditioner'} under dear in the sharded form: K-FAC changes whole gradients, and the "
            f"optimizer steps slices that would not see it; {way}"
        )
    if inside is not None:
        return TypeError(
            f"{inside} under dear: its step makes directions of gradients and uses them, and dear does it when the "
            f"next forward pass has begun, after zero_grad(); {way}"
        )
    return None


def dear_of(parameters: Iterable[Tensor]) -> DearSynchronizer | None:
    """What trains one of them by "dear" now."""
    given = list(parameters)
    for synchronizer in active_synchronizers():
        if isinstance(synchronizer, DearSynchronizer) and synchronizer._trains(given):
            return synchronizer
    return None


before_averaging.append(_check_averaging)
before_dear.append(_check_dear)
