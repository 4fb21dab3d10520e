"""A callback for ``transformers.Trainer``: the model is attached, and evaluated and saved as the average.

    Trainer(..., callbacks=[TorchextCallback()])

Make it before ``train()``: it looks at the DDP models that are made from then on.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchext.integrations.automatic import attach_found, is_ours, watch, wrapper_of
from torchext.synchronizer import Synchronizer

if TYPE_CHECKING:

    class TrainerCallback:
        """As declared by transformers, which need not be there to check types."""

else:
    from transformers import TrainerCallback

__all__ = ["TorchextCallback", "use_everywhere"]

_logger = logging.getLogger("torchext")


class TorchextCallback(TrainerCallback):
    """Attaches the model of a ``transformers.Trainer`` whose process group runs on a backend of torchext.

    In front of each evaluation and each save the workers' models become their average (``synchronize()``), on all ranks
    and for good: files, metrics and the model that goes on are the same. When training ends the model is the average,
    and detached. With another backend, without DistributedDataParallel, or where the script has attached the model
    itself, it does nothing.

    The Trainer saves on rank 0 alone. Where ``optimizer.state_dict()`` is collective (``dear``), all ranks call it in
    front of the save, and the Trainer gets what that gave.

    Args:
        say: Called on rank 0 with a line that says what was attached; by default the logger ``torchext``, as INFO.
    """

    def __init__(self, say: Callable[[str], Any] = _logger.info) -> None:
        watch()
        self._say = say
        self._synchronizer: Synchronizer | None = None
        self._held: list[Any] = []  # optimizers whose state_dict() is answered with what has been gathered

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attaches the model; collective."""
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

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The optimizer's state is its own again."""
        self._release()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """As behind a save, where there was none after all."""
        self._release()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The model is the average, and nothing is attached any more; collective."""
        self._release()
        synchronizer, self._synchronizer = self._synchronizer, None
        if synchronizer is not None:
            synchronizer.synchronize()
            synchronizer.detach()

    def _meet(self, args: Any, control: Any) -> None:
        synchronizer = self._synchronizer
        # With save_strategy="best" it is known only behind an evaluation whether there is a save.
        may_save = control.should_save or (control.should_evaluate and args.save_strategy == "best")
        if synchronizer is None or not (may_save or control.should_evaluate):
            return
        self._release()
        synchronizer.synchronize()
        if may_save and not args.save_only_model:
            self._hold(synchronizer, args.should_save)

    def _hold(self, synchronizer: Synchronizer, saves: bool) -> None:
        """Gathers the optimizer's state on all ranks, for the one that saves it."""
        with synchronizer.averaged():
            for optimizer in map(_untyped, synchronizer._optimizers):
                gathered = optimizer.state_dict()
                if saves:  # what the average holds ends with it
                    gathered = copy.deepcopy(gathered)
                optimizer.state_dict = functools.partial(_untyped, gathered)
                self._held.append(optimizer)

    def _release(self) -> None:
        for optimizer in self._held:
            vars(optimizer).pop("state_dict", None)
        self._held.clear()


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
