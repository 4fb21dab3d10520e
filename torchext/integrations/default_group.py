"""Has ``init_process_group`` make the default group on another backend than the script or its framework asks for."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchext.backends import BACKENDS

__all__ = ["instead_of", "replace_default_backend"]


def replace_default_backend(backend: str, options: Any, timeout: timedelta | None = None) -> None:
    """From now on ``init_process_group`` makes a group of this backend.

    A group that the script asks to be one of torchext's stays as the script wants it. So do groups of ``new_group``:
    without a backend's name they get what the default group would have had.

    Args:
        backend: A name of torchext's.
        options: Passed as ``pg_options``, instead of the script's.
        timeout: Of the group, instead of the script's; None: the script's.
    """
    asked: list[Any] = []  # the backend of the default group, had it not been replaced

    @instead_of("init_process_group")
    def init_process_group(original: Callable[..., Any], arguments: inspect.BoundArguments) -> Any:
        wanted = arguments.arguments.get("backend")
        asked.clear()
        if _names_ours(wanted):
            return original(*arguments.args, **arguments.kwargs)
        arguments.arguments["backend"] = backend
        arguments.arguments["pg_options"] = options
        if timeout is not None:
            arguments.arguments["timeout"] = timeout
        result = original(*arguments.args, **arguments.kwargs)
        asked.append(wanted if wanted is not None else _of_torch())
        return result

    @instead_of("new_group")
    def new_group(original: Callable[..., Any], arguments: inspect.BoundArguments) -> Any:
        if arguments.arguments.get("backend") is None and asked and dist.is_initialized():
            arguments.arguments["backend"] = asked[0]
        return original(*arguments.args, **arguments.kwargs)


def _names_ours(backend: Any) -> bool:
    """Whether a name, or one in ``cpu:name,cuda:name``, is one of torchext's."""
    parts = str(backend or "").lower().split(",")
    return any(part.rpartition(":")[2].strip() in BACKENDS for part in parts)


def _of_torch() -> str:
    """What torch takes where no backend is named."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def instead_of(name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts a function in the place of one of torch.distributed, wherever that has been imported to.

    The function is called with the one that it replaces and the arguments of the call.
    """
    original = getattr(dist.distributed_c10d, name)
    signature = inspect.signature(original)

    def decorate(function: Callable[[Callable[..., Any], inspect.BoundArguments], Any]) -> None:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # which says what is wrong
            return function(original, arguments)

        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, call)

    return decorate
