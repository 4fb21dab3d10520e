"""A synchronizer lives as long as its model, and ends in order when the script does."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TypeVar

from torch.nn.parallel import DistributedDataParallel

from torchext.ddp.synchronizer import Synchronizer

__all__ = ["keep_with_model"]

_Attached = TypeVar("_Attached", bound=Synchronizer)


def keep_with_model(ddp: DistributedDataParallel, synchronizer: _Attached) -> _Attached:
    """Keeps it as long as its model, and has it leave in order when the script ends."""
    ddp._torchext_synchronizer = synchronizer  # type: ignore[assignment]  # typed as a submodule
    _leave_at_exit(synchronizer)
    return synchronizer


def _leave_at_exit(synchronizer: Synchronizer) -> None:
    """Has it leave in order when the script ends."""
    reference, process = weakref.ref(synchronizer), os.getpid()

    def leave() -> None:
        alive = reference()
        # After an uncaught exception there is nothing to keep: the peers are told the reason instead. A forked child
        # owes nothing.
        if alive is not None and getattr(sys, "last_value", None) is None and os.getpid() == process:
            alive._leave_at_exit()

    atexit.register(leave)
    weakref.finalize(synchronizer, atexit.unregister, leave).atexit = False
