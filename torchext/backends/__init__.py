"""Registers the backend names of torchext with ``torch.distributed`` and builds the groups behind them.

``import torchext`` registers them; after that ``init_process_group("prague")``, ``new_group(backend="prague")`` and
``"cpu:gloo,cuda:prague"`` work.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, Store

from torchext import _C
from torchext.backends.resources import check_resources
from torchext.backends.store_prefix import attempt_store, decline
from torchext.backends.unattached import warn_of_unattached
from torchext.errors import BackendOptionsError, UnsupportedBackendError
from torchext.options import LONGEST_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "BACKENDS",
    "BackendClass",
    "Replacement",
    "backend_of",
    "group_of_one",
    "is_wrapped",
    "options_for",
    "register",
    "replacing",
    "set_default_options",
]

_DEFAULT_TIMEOUT = dist.distributed_c10d.default_pg_timeout
_CONNECT_GRACE = timedelta(seconds=5)
_MISSING = "these ranks did not finish making their part of the group, and say why themselves: "
# Survivors come to a new group when the old one has failed for each of them, however short its timeout.
_SHRINK_PATIENCE = timedelta(seconds=30)
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Replacement:
    """How the members of a group meet that takes the place of a failed one (``replacing``)."""

    store: Store
    """Where only they meet, for this one try."""
    patience: timedelta
    """How long they may take to come,"""
    connecting: timedelta
    """and then to connect, whatever the group's timeout."""
    called_off: Callable[[], bool]
    """Whether there will be no group."""
    settle: Callable[[], None]
    """Called when this process has connected: returns where all have; else raises RuntimeError, on all of them."""


_replacement: ContextVar[Replacement | None] = ContextVar("torchext_replacement", default=None)
# Of groups that are made without options, by backend.
_default_options: dict[str, Any] = {}


@dataclass(frozen=True)
class BackendClass:
    """What stands behind one backend name."""

    options: type[Any]
    """The type that ``pg_options`` must have; called without arguments when the user passes none."""
    create: Callable[[int, int, _C.InnerBackends, Any], Any]
    """(rank, size, inner backends, options) -> the C++ backend."""


BACKENDS: dict[str, BackendClass] = {
    "dear": BackendClass(options=_C.DeAROptions, create=_C.ProcessGroupDear),
    "dssync": BackendClass(options=_C.DSSyncOptions, create=_C.ProcessGroupDSSync),
    "hop": BackendClass(options=_C.HopOptions, create=_C.ProcessGroupHop),
    "prague": BackendClass(options=_C.PragueOptions, create=_C.ProcessGroupPrague),
    # Last: DeAROptions alone mean "dear".
    "torchext": BackendClass(options=_C.DeAROptions, create=functools.partial(_C.ProcessGroupDear, name="torchext")),
}


def register() -> None:
    """Makes every backend name of torchext known to ``torch.distributed``. Harmless when called again."""
    for name in BACKENDS:
        if name.upper() in dist.Backend._plugins:
            continue
        dist.Backend.register_backend(name, _creator(name), extended_api=True, devices=["cpu", "cuda"])
    _register_shrunk_groups()
    if not getattr(register, "at_exit", False):
        atexit.register(_leave_at_exit)
        register.at_exit = True  # type: ignore[attr-defined]


def _register_shrunk_groups() -> None:
    """Has ``dist.shrink_group`` register a backend of ours for what it is.

    It takes every backend of the CPU for Gloo itself, and DDP reads from Gloo what only Gloo has: a crash.
    """
    create = getattr(dist.distributed_c10d, "_create_shrunk_process_group", None)
    if create is None or hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_as_custom(new_backend: Any, *args: Any, **kwargs: Any) -> ProcessGroup:
        group: ProcessGroup = create(new_backend, *args, **kwargs)
        if isinstance(new_backend, _C.DelegatingBackend):
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, new_backend)
            group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        return group

    dist.distributed_c10d._create_shrunk_process_group = create_as_custom


def backend_of(group: ProcessGroup | None = None) -> _C.DelegatingBackend:
    """The C++ backend of ``group`` (the default group if ``None``) for CPU tensors.

    What one backend adds is found by its class: ``isinstance(backend, torchext.ProcessGroupPrague)``.

    Raises:
        TypeError: ``group`` is no process group.
        UnsupportedBackendError: The group runs on another backend.
    """
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            "torchext.backend_of takes a process group of torch.distributed, or None for the default group, got "
            f"{group!r} ({type(group).__name__}); new_group and DeviceMesh.get_group return such groups to members"
        )
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        if isinstance(backend, _C.DelegatingBackend):
            return backend
    raise UnsupportedBackendError(
        f"the group's backend is {dist.get_backend(group)!r}; torchext's are {', '.join(sorted(BACKENDS))}."
        " Create the group with one of them, as in init_process_group('prague')"
    )


def is_wrapped(group: ProcessGroup) -> bool:
    """Whether torch checks the group's calls with a barrier of its own: ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    return any(hasattr(group._get_backend(device), "wrapped_pg") for device in group._device_types)


@contextlib.contextmanager
def replacing(replacement: Replacement) -> Iterator[None]:
    """A group that is made in here takes the place of a failed one."""
    before = _replacement.set(replacement)
    try:
        yield
    finally:
        _replacement.reset(before)


def _creator(name: str) -> Callable[[Any, object | None], Any]:
    def create(opts: Any, pg_options: object | None) -> Any:
        with _declining(opts):
            options = _options(name, pg_options, opts)
            check_resources(opts.group_size, 2 if opts.group_size > 1 else 1)
        timeout: timedelta = options._timeout
        anew = _replacement.get()
        if not anew:
            # Others may wait for an average with this rank, and this one would wait for them.
            _C.drain_averages()
        patience = anew.connecting if anew else timeout
        store = _connecting(attempt_store(opts.store, opts.group_rank, opts.group_size, patience, is_fresh=bool(anew)))
        members = options.global_ranks_in_group
        inner = _inner_backends(store, opts.group_rank, opts.group_size, timeout, opts.group_id, members)
        store.set(f"connected/{opts.group_rank}", _watching(options))
        try:
            if opts.group_size > 1 and not anew:  # groups that are formed anew have agreed before
                _agree_on_watching(store, opts.group_rank, opts.group_size, name, timeout)
            backend = BACKENDS[name].create(opts.group_rank, opts.group_size, inner, options)
        except Exception:
            _await_connected(store, opts.group_size)
            raise

        def inner_of(remaining: list[int], rank: int) -> _C.InnerBackends:
            """The inner groups of ``dist.shrink_group``."""
            if anew := _replacement.get():
                shrunk = attempt_store(anew.store, rank, len(remaining), anew.patience, anew.called_off, is_fresh=True)
            else:  # they meet where only this membership does
                meeting = PrefixStore(f"shrunk/{'_'.join(map(str, remaining))}", store)
                shrunk = attempt_store(meeting, rank, len(remaining), max(timeout, _SHRINK_PATIENCE))
            ranks = [members[position] for position in remaining]
            return _inner_backends(_connecting(shrunk), rank, len(remaining), timeout, f"{opts.group_id}:shrunk", ranks)

        backend._set_inner_factory(inner_of)
        if opts.group_size > 1:
            warn_of_unattached(backend_of)
        return backend

    return create


@contextlib.contextmanager
def _declining(opts: Any) -> Iterator[None]:
    """What is wrong in here keeps this rank from joining the group; those that wait for it learn that, and why."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        if not _replacement.get():  # where groups are formed anew, who is missing is found in another way
            decline(opts.store, opts.group_rank, opts.group_size, error)
        raise


def set_default_options(options: Any) -> None:
    """From now on a group of these options' backend that is made without ``pg_options`` has them.

    For frameworks that make the group by its backend's name alone. All ranks set the same.

    Raises:
        BackendOptionsError: They are of no backend of torchext's.
    """
    for name, backend in BACKENDS.items():
        if isinstance(options, backend.options):
            _default_options[name] = copy.copy(options)
            return
    raise BackendOptionsError(
        f"options are {type(options).__module__}.{type(options).__qualname__}; pass one of "
        + ", ".join(f"torchext.{backend.options.__qualname__}" for backend in BACKENDS.values())
    )


def options_for(name: str, pg_options: object | None) -> Any:
    """A copy of the options that the user passed for a backend, or its defaults.

    Raises:
        BackendOptionsError: ``pg_options`` are those of another backend.
    """
    expected = BACKENDS[name].options
    if pg_options is None:
        return copy.copy(_default_options[name]) if name in _default_options else expected()
    if isinstance(pg_options, expected):
        return copy.copy(pg_options)  # the user's own may serve several groups
    raise BackendOptionsError(
        f"pg_options for backend {name!r} is {type(pg_options).__module__}.{type(pg_options).__qualname__}; leave"
        f" it out, or pass torchext.{expected.__qualname__}(...)"
    )


def _options(name: str, pg_options: object | None, opts: Any) -> Any:
    """The C++ options of one group: the user's, or defaults, with what torch decides filled in."""
    options = options_for(name, pg_options)
    # init_process_group always passes a timeout: the default says nothing about what the user wants.
    if opts.timeout != _DEFAULT_TIMEOUT or pg_options is None:
        options._timeout = opts.timeout
    if not timedelta(0) < options._timeout <= LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout of a {name} group must be more than 0 and at most {LONGEST_TIMEOUT.days} days, got"
            f" {options._timeout} (torch turns around what is far beyond); leave it out for 30 minutes"
        )
    options.group_name = opts.group_id
    options.global_ranks_in_group = opts.global_ranks_in_group or list(range(opts.group_size))
    return options


def _connecting(store: Store) -> Store:
    """The store in which the ranks of one group connect.

    There they learn at once who cannot. Where groups are formed anew, who is missing is found in another way.
    """
    return store if _replacement.get() else _C.ConnectingStore(store)


def _inner_backends(
    store: Store, rank: int, size: int, timeout: timedelta, group_name: Any, members: list[int]
) -> _C.InnerBackends:
    """Gloo, NCCL where there is a GPU, and Gloo for control messages where there is a peer; collective."""
    try:
        return _connected(store, rank, size, timeout, group_name, members)
    except BaseException as error:
        if isinstance(store, _C.ConnectingStore):
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it the others
                text = " ".join(str(error).split())[:_LONGEST_REASON]
                store.refuse(f"rank {rank} cannot connect to the others: {type(error).__name__}: {text}")
                store.set(f"told/{rank}", "1")
                if rank == 0 and isinstance(error, Exception):  # the store may be this process's
                    _await_told(store, size)
        raise


def _connected(
    store: Store, rank: int, size: int, timeout: timedelta, group_name: Any, members: list[int]
) -> _C.InnerBackends:
    anew = _replacement.get()
    if anew:
        _C.fault_point("group.arrived")
    connecting = anew.connecting if anew else timeout
    sockets = _C.ClosedInChildren()
    cpu = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout=connecting)
    cuda = _nccl(store, rank, size, timeout, group_name, members)
    control = None
    if size > 1:
        # Its timeout is that of connecting, so that a rank that never comes is an error and not a hang; endless waits
        # on it say so themselves.
        control = dist.ProcessGroupGloo(PrefixStore("control", store), rank, size, timeout=connecting)
        control._set_default_timeout(timeout)
    sockets.watch()
    cpu._set_default_timeout(timeout)
    if anew:
        _C.fault_point("group.connected")
        anew.settle()
    return _C.InnerBackends(cpu=cpu, cuda=cuda, control=control, sockets=sockets)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta, group_name: Any, members: list[int]) -> Any:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = group_name
    options.global_ranks_in_group = members
    return dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)


def group_of_one() -> ProcessGroup:
    """The group of this process alone, for what torch wants a group for; ``torch.distributed`` does not know of it."""
    return _group_of(os.getpid())


@functools.cache
def _group_of(process: int) -> ProcessGroup:  # a forked child has none of its parent's threads
    store, timeout = HashStore(), timedelta(minutes=1)
    kinds = ProcessGroup.BackendType
    group = ProcessGroup(store, 0, 1)
    check_resources(1, 1)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_default_device()]
    options._threads = 1  # Gloo ends the process where it gets the first of several, and not the next
    options._timeout = timeout
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo(store, 0, 1, options))
    nccl = _nccl(store, 0, 1, timeout, "torchext: one", [0])
    if nccl is not None:
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    group._set_default_backend(kinds.GLOO)
    return group


def _watching(options: Any) -> str:
    """The options by which ranks watch each other, as text."""
    every = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    check = "every" if options.call_check == "new" and every else options.call_check
    beat = options.heartbeat_timeout.total_seconds()
    return f'heartbeat_timeout = {beat:g} s, call_check = "{check}"'


def _agree_on_watching(store: Store, rank: int, size: int, name: str, timeout: timedelta) -> None:
    """Raises on every rank if two differ: one would wait for what the other never sends. Rank 0 compares.

    Also where one has not come this far: it may have failed when it made its inner groups.
    """
    keys = [f"connected/{other}" for other in range(size)]
    if rank == 0:
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            store.set("watching", f"{_MISSING}{missing}")
            raise dist.DistStoreError(f"{name}: {_MISSING}{missing}") from error
        given = [value.decode() for value in store.multi_get(keys)]
        other = next((other for other, value in enumerate(given) if value != given[0]), 0)
        store.set("watching", f"rank 0 has {given[0]}, rank {other} has {given[other]}" if other else "")
    store.wait(["watching"], timeout + timedelta(seconds=1))  # later than rank 0, which knows more
    different = store.get("watching").decode()
    if different.startswith(_MISSING):
        raise dist.DistStoreError(f"{name}: {different}")
    if different:
        raise ValueError(
            f"{name}: {different}; pass the same options (and TORCH_DISTRIBUTED_DEBUG) on all ranks of a group"
        )


def _await_connected(store: Store, size: int) -> None:
    """Lets every rank connect before this one, which refuses its options, closes its connections.

    A rank whose options are at fault too would otherwise find a closed connection and not what is wrong with them.
    """
    with contextlib.suppress(RuntimeError):  # a rank that does not come has a reason of its own
        store.wait([f"connected/{rank}" for rank in range(size)], _CONNECT_GRACE)


def _await_told(store: Store, size: int) -> None:
    """Lets every rank learn that the group does not come about, for some seconds at most."""
    deadline = time.monotonic() + _CONNECT_GRACE.total_seconds()
    while not store.check([f"told/{rank}" for rank in range(size)]) and time.monotonic() < deadline:
        time.sleep(0.01)


def _leave_at_exit() -> None:
    """Leaves all groups at interpreter exit; peers learn of an uncaught exception that ends this process."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    reason = ""
    if error is not None:
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
        reason = f"rank {rank} exits with an uncaught {type(error).__name__}: {str(error)[:120]}"
    _C.leave_all(reason)
