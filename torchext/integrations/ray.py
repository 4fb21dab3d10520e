"""Ray Train makes the process group by its backend's name; a configuration here gives that group options.

    TorchTrainer(train, torch_config=TorchextConfig(torchext.DeAROptions(form="sharded")), ...)

Without options ``TorchConfig(backend="dear")`` is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchext.backends import BACKENDS, set_default_options
from torchext.errors import BackendOptionsError

if TYPE_CHECKING:

    class TorchConfig:
        """As declared by Ray, which need not be there to check types."""

        backend: str | None

        def __init__(self, backend: str, init_method: str, timeout_s: int) -> None: ...

    class _TorchBackend:
        """Of Ray as well."""

        def on_start(self, worker_group: Any, backend_config: Any) -> None: ...

else:
    from ray.train.torch import TorchConfig

    _TorchBackend = TorchConfig().backend_cls

__all__ = ["TorchextConfig"]


class _Backend(_TorchBackend):
    """Has every worker know the options before it makes the group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(set_default_options, backend_config.options)
        super().on_start(worker_group, backend_config)


@dataclass(init=False)
class TorchextConfig(TorchConfig):
    """Ray's TorchConfig for a backend of torchext's with options.

    Args:
        options: Of the backend that is wanted.
        init_method: As of TorchConfig.
        timeout_s: As of TorchConfig.

    Raises:
        BackendOptionsError: The options are of no backend of torchext's.
    """

    options: Any

    def __init__(self, options: Any, init_method: str = "env", timeout_s: int = 1800) -> None:
        names = [name for name, backend in BACKENDS.items() if isinstance(options, backend.options)]
        if not names:
            raise BackendOptionsError(
                f"TorchextConfig takes the options of a backend, got {options!r}; pass torchext.PragueOptions(...)"
            )
        super().__init__(backend=names[0], init_method=init_method, timeout_s=timeout_s)
        self.options = options

    @property
    def backend_cls(self) -> type[_Backend]:
        """What makes the group."""
        return _Backend
