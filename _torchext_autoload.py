"""Makes torchext's backend names known to torch without importing torchext.

torch calls ``register`` by itself, through the entry points in pyproject.toml: with ``import torch`` (group
``torch.backends``), and when a backend name is looked up (group ``torch.distributed.backends``, torch 2.15 and later).

This module stands outside the package because importing anything from inside it would load torchext's native code into
every program that imports torch, and a damaged file there would then break ``import torch``. Here only names are
registered; the package is imported when a process group of that name is created, and its errors appear there.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

BACKENDS: tuple[str, ...] = ("dear", "dssync", "hop", "prague", "torchext")
DEVICES: tuple[str, ...] = ("cpu", "cuda")


def _create(name: str, dist_backend_opts: Any, pg_options: Any) -> Any:
    """Imports torchext, which puts its real creator in this function's place, and calls that."""
    from torch.distributed import Backend

    key = name.upper()
    # The name goes back to "never seen", so that the package's own registration cannot take it for done.
    Backend._plugins.pop(key, None)
    try:
        backends = importlib.import_module("torchext.backends")
        if key not in Backend._plugins:
            # torchext was imported before, and something put this function back over its creator.
            backends.register()
        creator = Backend._plugins[key].creator_fn
    except BaseException:
        _register_name(name)
        raise
    return creator(dist_backend_opts, pg_options)


def _register_name(name: str) -> None:
    from torch.distributed import Backend

    Backend.register_backend(name, functools.partial(_create, name), extended_api=True, devices=list(DEVICES))


def register() -> None:
    """Registers every backend name that is not registered yet. Never raises: it runs inside ``import torch``."""
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        for name in BACKENDS:
            if name.upper() not in dist.Backend._plugins:
                _register_name(name)
    except Exception as error:
        warnings.warn(f"torchext could not register its backends with torch: {error!r}", RuntimeWarning, stacklevel=2)
