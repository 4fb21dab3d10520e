"""torchext: faster data-parallel training by the name of a backend.

``init_process_group("prague")``, ``DistributedDataParallel(model)``, ``torchext.attach(model, optimizer)``; the
training loop does not change.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchext._build import check_torch
from torchext._version import __version__

check_torch()  # a module built for another torch would crash, not fail

from torchext import nn, ops  # noqa: E402
from torchext._dear_synchronizer import DearSynchronizer  # noqa: E402
from torchext._hop_synchronizer import HopSynchronizer  # noqa: E402
from torchext._join import join  # noqa: E402
from torchext.attach import attach  # noqa: E402
from torchext.backends import backend_of, register  # noqa: E402
from torchext.options import DeAROptions, DSSyncOptions, HopOptions, PragueOptions  # noqa: E402
from torchext.synchronizer import Synchronizer  # noqa: E402

if TYPE_CHECKING:
    from torchext import optim

__all__ = [
    "DSSyncOptions",
    "DeAROptions",
    "DearSynchronizer",
    "HopOptions",
    "HopSynchronizer",
    "PragueOptions",
    "Synchronizer",
    "__version__",
    "attach",
    "backend_of",
    "join",
    "nn",
    "ops",
    "optim",
    "register",
]

register()


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: what needs no K-FAC need not wait for it.
    if name == "optim":
        return importlib.import_module("torchext.optim")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
