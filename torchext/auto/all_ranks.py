"""Exchanges small objects between all ranks, so that they agree, and so that an error on one is raised on all."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchext import _C
from torchext.backends import backend_of
from torchext.errors import UnsupportedBackendError

__all__ = ["check_same", "checked_group", "device_of", "errors_on_all", "gathered", "own_backend", "sent_by_first"]

_Value = TypeVar("_Value")


def checked_group(caller: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one.

    Raises:
        RuntimeError: Before ``init_process_group``.
        TypeError: ``group`` is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(f"{caller} before torch.distributed.init_process_group; initialize it first")
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{caller}: group must be a process group of torch.distributed, or None for the default group, got "
            f"{type(group).__name__}; take what new_group returns to its members"
        )
    return group


def own_backend(group: dist.ProcessGroup) -> _C.AttachableBackend | None:
    """The group's backend where it is one of torchext's."""
    try:
        backend = backend_of(group)
    except UnsupportedBackendError:
        return None
    return backend if isinstance(backend, _C.AttachableBackend) else None


def device_of(caller: str, group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    """The device whose tensors the group is to carry; None: the CPU where it can, else the current one.

    Raises:
        TypeError: The group carries no tensors of that device, or only by way of the CPU.
    """
    kinds = [kind.type for kind in group._device_types]
    found = torch.device(device if device is not None else "cpu" if "cpu" in kinds else kinds[0])
    if found.type not in kinds:
        raise TypeError(
            f"{caller}: the group carries tensors of {', '.join(kinds)}, and device is {found}; make the group with a "
            "backend for that device, as init_process_group('cpu:gloo,cuda:nccl')"
        )
    if found.type != "cpu":
        backend = group._get_backend(found)
        if isinstance(getattr(backend, "wrapped_pg", backend), dist.ProcessGroupGloo):
            raise TypeError(
                f"{caller}: device is {found}, and the group's backend for it is Gloo, which copies through the CPU; "
                "make the group with NCCL or a backend of torchext's"
            )
        if found.index is None:
            found = torch.device(found.type, torch.accelerator.current_device_index())
    return found


def gathered(group: dist.ProcessGroup, value: _Value) -> list[_Value]:
    """What each rank has. Collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def sent_by_first(group: dist.ProcessGroup, value: _Value | None) -> _Value:
    """What rank 0 of the group has. Collective."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    result: _Value = values[0]
    return result


@contextlib.contextmanager
def errors_on_all(caller: str, group: dist.ProcessGroup) -> Iterator[None]:
    """What is raised in here on one rank is raised on all of them. Collective at its end; no collective in it.

    Raises:
        TypeError, ValueError, RuntimeError: Another rank has raised one; a RuntimeError for what is none of these.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    found = gathered(group, None if own is None else (type(own).__name__, str(own)))
    if own is not None:
        raise own
    for rank, error_of_rank in enumerate(found):
        if error_of_rank is not None:
            name, text = error_of_rank
            kind = {"TypeError": TypeError, "ValueError": ValueError}.get(name, RuntimeError)
            raise kind(f"{caller}: rank {rank} raised {name}: {text}")


def check_same(
    caller: str, group: dist.ProcessGroup, values: dict[str, Any], *, kind: type[Exception] = ValueError
) -> None:
    """Compares what all ranks must have alike. Collective.

    Args:
        caller: Of whom the error is.
        group: The ranks.
        values: By name; where names differ, the count of something must come before they do.
        kind: What is raised, on all ranks: the first value that differs, with both texts.
    """
    own = {name: repr(value) for name, value in values.items()}
    hashes = gathered(group, hashlib.sha256(repr(own).encode()).hexdigest())
    if len(set(hashes)) == 1:
        return
    texts = gathered(group, own)
    for name, first in texts[0].items():
        for rank, other in enumerate(texts):
            if other[name] != first:
                raise kind(
                    f"{caller}: {name} is {first} on rank 0 and {other[name]} on rank {rank}; pass the same everywhere"
                )
