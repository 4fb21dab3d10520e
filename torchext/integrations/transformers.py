"""A callback for ``transformers.Trainer``: the model is attached, and evaluated and saved as the average.

    Trainer(..., callbacks=[TorchextCallback()])

Make it before ``train()``: it looks at the DDP models that are made from then on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchext.ddp.synchronizer import Synchronizer
from torchext.integrations.automatic import attach_found, is_ours, watch, wrapper_of

if TYPE_CHECKING:

    class TrainerCallback:
        """As declared by transformers, which need not be there to check types."""

else:
    from transformers import TrainerCallback

__all__ = ["TorchextCallback", "use_everywhere"]

_logger = logging.getLogger("torchext")


class TorchextCallback(TrainerCallback):
    """Attaches the model of a ``transformers.Trainer`` whose process group runs on a backend of torchext.

    Evaluations and saves have the average of all workers (``averaged()``): metrics and files are those of one model. At
    the next step every worker goes on with its own replica. When training ends, the model is the average, or the best
    one that the Trainer has loaded, and detached. With another backend, without DistributedDataParallel, or where the
    script has attached the model itself, it does nothing.

    The Trainer saves on rank 0 alone. ``optimizer.state_dict()`` is collective in the sharded form of ``dear``: all
    ranks call it in front of the save, and the Trainer gets what that gave.

    Args:
        say: Called on rank 0 with a line that says what was attached; by default the logger ``torchext``, as INFO.
    """

    def __init__(self, say: Callable[[str], Any] = _logger.info) -> None:
        watch()
        self._say = say
        self._synchronizer: Synchronizer | None = None
        self._average = contextlib.ExitStack()  # from an evaluation or a save until the next step
        self._averaging = False
        self._held: list[Any] = []  # optimizers whose state_dict() is answered with what has been gathered

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attaches the model; collective."""
        self._leave()  # where an error ended the training before
        ddp = wrapper_of(given["model"])
        if ddp is None or not is_ours(ddp) or getattr(ddp, "_torchext_synchronizer", None) is not None:
            return
        self._synchronizer = attach_found(ddp, [given["optimizer"]], say=self._say)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The model becomes the average if it is evaluated or saved next."""
        self._meet(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """As behind a step."""
        self._meet(args, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Every worker goes on with its own."""
        self._leave()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The model is the average, and nothing is attached any more; collective."""
        synchronizer, self._synchronizer = self._synchronizer, None
        if synchronizer is None:
            return
        # Behind the last save the Trainer may have loaded the best model, on all ranks.
        shown = [*synchronizer._ddp.module.parameters(), *synchronizer._ddp.module.buffers()] if self._averaging else []
        values = [tensor.detach().clone() for tensor in shown]
        self._leave()
        synchronizer.synchronize()
        synchronizer.detach()
        with torch.no_grad():
            for tensor, value in zip(shown, values, strict=True):
                tensor.copy_(value)

    def _meet(self, args: Any, control: Any) -> None:
        synchronizer = self._synchronizer
        # With save_strategy="best" it is known only behind an evaluation whether there is a save.
        may_save = control.should_save or (control.should_evaluate and args.save_strategy == "best")
        if synchronizer is None or not (may_save or control.should_evaluate):
            return
        self._leave()
        saves_state = may_save and not args.save_only_model
        self._average.enter_context(synchronizer.averaged(optimizer_state=saves_state))
        self._averaging = True
        if saves_state:
            self._hold(synchronizer)

    def _hold(self, synchronizer: Synchronizer) -> None:
        """Gathers the optimizer's state on all ranks, for the one that saves it."""
        for optimizer in map(_untyped, synchronizer._optimizers):
            optimizer.state_dict = functools.partial(_untyped, optimizer.state_dict())
            self._held.append(optimizer)

    def _leave(self) -> None:
        for optimizer in self._held:
            vars(optimizer).pop("state_dict", None)
        self._held.clear()
        self._averaging = False
        self._average.close()


def _untyped(value: Any) -> Any:
    return value


@functools.cache
def use_everywhere(say: Callable[[str], Any]) -> None:
    """Gives a callback to every Trainer that has none when it begins to train, for scripts that are not to be touched.

    Args:
        say: As of :class:`TorchextCallback`.
    """
    handler: Any = importlib.import_module("transformers.trainer_callback").CallbackHandler
    begin = handler.on_train_begin

    @functools.wraps(begin)
    def on_train_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(callback, TorchextCallback) for callback in self.callbacks):
            self.add_callback(TorchextCallback(say))
        return begin(self, *args, **kwargs)

    handler.on_train_begin = on_train_begin
