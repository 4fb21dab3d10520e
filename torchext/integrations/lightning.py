"""The callback that Lightning finds (``_torchext_lightning.py``) acts where a group of torchext is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from torchext.ddp.synchronizer import Synchronizer
from torchext.integrations.automatic import attach_found, is_ours

__all__ = ["Fit", "attach_fit"]


def attach_fit(trainer: Any, schedule: dict[str, Any], say: Callable[[str], Any]) -> Fit | None:
    """Attaches the model that a Trainer fits. Collective.

    Args:
        trainer: Lightning's, before its first batch.
        schedule: ``Synchronizer.state_dict()`` of a checkpoint; empty: there is none.
        say: Called with a line that says what was attached.

    Returns:
        None where there is nothing to attach: another strategy or backend, a model that the script has attached itself,
        or one without an optimizer that has all of its parameters, of which rank 0 warns.
    """
    model = getattr(trainer.strategy, "model", None)
    if not is_ours(model) or getattr(model, "_torchext_synchronizer", None) is not None:
        return None
    synchronizer = attach_found(model, trainer.optimizers, say=lambda line: say(f"torchext: {line}"))
    if synchronizer is None:
        return None
    if schedule:
        synchronizer.load_state_dict(schedule)
    return Fit(trainer, synchronizer)


class Fit:
    """One attached fit of a Trainer.

    ``trainer.save_checkpoint`` is called by all ranks; no hook stands in front of its reading the model. Until the fit
    ends the method is therefore one that reads the average.
    """

    def __init__(self, trainer: Any, synchronizer: Synchronizer) -> None:
        self.synchronizer = synchronizer
        self._trainer = trainer
        self._average = contextlib.ExitStack()
        self._averaging = False
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with self._on_average():
                save(*args, **kwargs)

        trainer.save_checkpoint = save_checkpoint

    def enter_average(self) -> None:
        """The model becomes the average of all workers, unless it is that already. Collective."""
        if not self._averaging:
            self._average.enter_context(self.synchronizer.averaged())
            self._averaging = True

    def leave_average(self) -> None:
        """Every worker goes on with its own model."""
        self._averaging = False
        self._average.close()

    def end(self) -> None:
        """Leaves the average in the model, and detaches it. Collective."""
        self.leave_average()
        self._remove()
        self.synchronizer.synchronize()
        self.synchronizer.detach()

    def abandon(self) -> None:
        """After an error: this worker's own model, without the others."""
        self._remove()
        with contextlib.suppress(dist.DistBackendError):
            self.leave_average()

    @contextlib.contextmanager
    def _on_average(self) -> Iterator[None]:
        if self._averaging:
            yield
            return
        self.enter_average()
        try:
            yield
        finally:
            self.leave_average()

    def _remove(self) -> None:
        vars(self._trainer).pop("save_checkpoint", None)
