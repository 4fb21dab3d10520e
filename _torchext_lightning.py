"""Callbacks that Lightning finds by itself, through the entry points in pyproject.toml.

Lightning asks for them whenever a Trainer is made, most of which have nothing to do with torchext. This module
therefore stands outside the package, as ``_torchext_autoload``, and imports it only where a process group of torchext
is in use.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["lightning_callbacks", "make_callback", "pytorch_lightning_callbacks"]


def lightning_callbacks() -> list[Any]:
    """For ``import lightning``."""
    return [make_callback("lightning.pytorch")]


def pytorch_lightning_callbacks() -> list[Any]:
    """For ``import pytorch_lightning``."""
    return [make_callback("pytorch_lightning")]


def make_callback(package: str) -> Any:
    """A callback for the Trainer of one of Lightning's packages."""
    base = importlib.import_module(f"{package}.callbacks").Callback
    kind = type("TorchextCallback", (_Hooks, base), {"__doc__": _Hooks.__doc__, "__module__": __name__})
    return kind(package)


class _Hooks:
    """Attaches the model that is fitted, where its DDP strategy runs on a backend of torchext; else does nothing.

    Before the first batch of a fit, unless the script has called ``torchext.attach`` itself by then. Validation, and
    what ``trainer.save_checkpoint`` writes, hold the average of all workers, and so does the model when fit ends.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._fit: Any = None  # what is attached: torchext.integrations.lightning.Fit
        self._looked = False  # in this fit
        self._schedule: dict[str, Any] = {}  # of a checkpoint

    def __reduce__(self) -> Any:
        return make_callback, (self._package,)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A fit begins."""
        self._looked, self._fit = False, None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Attaches once in a fit."""
        if self._looked:
            return
        self._looked = True
        if "torchext.backends" in sys.modules:  # else no group is one of ours
            from torchext.integrations.lightning import attach_fit

            say = importlib.import_module(f"{self._package}.utilities.rank_zero").rank_zero_info
            self._fit = attach_fit(trainer, self._schedule, say)
        self._schedule = {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The model becomes the average."""
        if self._fit is not None:
            self._fit.enter_average()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Every worker has its own again."""
        if self._fit is not None:
            self._fit.leave_average()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The model is the average, and nothing is attached any more."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Without the other workers, who may not know of it."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.abandon()

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position, for the checkpoint."""
        return {} if self._fit is None else {"schedule": self._fit.synchronizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the model is attached."""
        self._schedule = dict(state_dict.get("schedule", {}))
