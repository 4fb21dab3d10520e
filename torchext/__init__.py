"""torchext: faster data-parallel training by the name of a backend.

``init_process_group("prague")``, ``DistributedDataParallel(model)``, ``torchext.attach(model, optimizer)``; the
training loop does not change.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchext._build import load_native
from torchext._version import __version__
from torchext.diagnosis import report_import_error

with report_import_error():
    # Checks torch first: a module built for another would crash, not fail.
    load_native("_C")
    load_native("_kernels")

from torchext import nn, ops
from torchext._attach import attach
from torchext._C import ProcessGroupDear, ProcessGroupDSSync, ProcessGroupHop, ProcessGroupPrague
from torchext.backends import backend_of, register
from torchext.ddp.attach_checks import attachers
from torchext.ddp.synchronizer import Synchronizer
from torchext.dear.dear_synchronizer import DearSynchronizer
from torchext.decentralized.hop_synchronizer import HopSynchronizer
from torchext.elastic.join import join_running_job
from torchext.options import DeAROptions, DSSyncOptions, HopOptions, PragueOptions

if TYPE_CHECKING:
    from torchext import auto, optim

__all__ = [
    "DSSyncOptions",
    "DeAROptions",
    "DearSynchronizer",
    "HopOptions",
    "HopSynchronizer",
    "PragueOptions",
    "ProcessGroupDSSync",
    "ProcessGroupDear",
    "ProcessGroupHop",
    "ProcessGroupPrague",
    "Synchronizer",
    "__version__",
    "attach",
    "auto",
    "backend_of",
    "join_running_job",
    "nn",
    "ops",
    "optim",
    "register",
]

join = join_running_job  # its name until 0.1

register()


def _attach_choosing(*given: Any) -> Synchronizer:
    synchronizer: Synchronizer = importlib.import_module("torchext.auto.live_choice").attach_choosing(*given)
    return synchronizer


attachers["torchext"] = _attach_choosing


def __getattr__(name: str) -> Any:
    # Imported when they are asked for: what needs no K-FAC need not wait for it.
    if name in ("auto", "optim"):
        return importlib.import_module(f"torchext.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
