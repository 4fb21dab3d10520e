"""``join_running_job``: what a newcomer to a running job calls in the place of ``init_process_group``.

It finds the job's store and prepares a :class:`~torchext.elastic.newcomers.Newcomer`, which ``attach`` takes from here.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, ProcessGroup, Store, TCPStore

from torchext.backends import BACKENDS, options_for
from torchext.elastic.newcomers import Newcomer
from torchext.options import LONGEST_TIMEOUT

__all__ = ["forget_newcomer", "join_running_job", "newcomer_of"]

_NOT_JOINED = ("dear", "torchext")  # each worker holds what dies with it
_newcomer: Newcomer | None = None


def join_running_job(
    backend: str,
    init_method: str = "env://",
    *,
    store: Store | None = None,
    pg_options: Any = None,
    timeout: timedelta = timedelta(minutes=30),
) -> None:
    """Takes the place of ``init_process_group`` in a worker that joins a job which is running already.

    The workers of the job train with ``attach(..., on_peer_failure="continue")``. After ``join_running_job`` this
    process is a group of one, in which the model is wrapped as usual. ``attach``, with the same argument, waits for the
    workers: they let newcomers in when they have formed an exact average (``synchronize``, or at the end of
    ``averaged``). It returns as one of them, with the parameters, buffers and optimizer state of the first worker.
    ``dist.get_rank()`` and ``dist.get_world_size()`` tell its place then.

        torchext.join_running_job("prague", "tcp://10.0.0.1:29500")
        model = DistributedDataParallel(Net())
        sync = torchext.attach(model, optimizer, on_peer_failure="continue")

    Args:
        backend: The job's.
        init_method: Where the job's store is: ``env://`` (MASTER_ADDR and MASTER_PORT), ``tcp://host:port`` or
            ``file://path``. One job a store.
        store: The store itself, instead of ``init_method``.
        pg_options: The job's.
        timeout: For the workers to come to an exact average, once this one is in ``attach``.

    Raises:
        RuntimeError: ``torch.distributed`` is initialized already.
        ValueError: ``backend`` cannot be joined, ``init_method`` or ``MASTER_PORT`` is not understood, or ``timeout``
            is not above 0 and at most ten years.
        TypeError: ``timeout`` is no timedelta, or ``init_method`` no str.
        torchext.errors.BackendOptionsError: ``pg_options`` are those of another backend.
        torch.distributed.DistError: There is no store.
    """
    global _newcomer
    if dist.is_initialized():
        raise RuntimeError("torchext.join_running_job after init_process_group; it takes its place")
    if backend not in BACKENDS or backend in _NOT_JOINED:
        can = ", ".join(repr(name) for name in sorted(BACKENDS) if name not in _NOT_JOINED)
        raise ValueError(f"torchext.join_running_job: backend must be one of {can}, got {backend!r}")
    options = options_for(backend, pg_options)
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"torchext.join_running_job: timeout must be a datetime.timedelta, got {timeout!r} "
            f"({type(timeout).__name__}); "
            "timedelta(seconds=...) makes one"
        )
    if not timedelta(0) < timeout <= LONGEST_TIMEOUT:
        raise ValueError(
            f"torchext.join_running_job: timeout must be more than 0 and at most {LONGEST_TIMEOUT.days} days, got "
            f"{timeout}"
        )
    if store is None:
        store = _store_at(init_method)
    newcomer = Newcomer(store, backend, options, timeout)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    newcomer.group = dist.group.WORLD
    _newcomer = newcomer


def newcomer_of(group: ProcessGroup) -> Newcomer | None:
    """What :func:`join_running_job` has prepared, if ``group`` is the one it has made and still the default."""
    if _newcomer is None or _newcomer.group is not group or group is not dist.group.WORLD:
        return None
    return _newcomer


def forget_newcomer() -> None:
    """It is one of the workers now; until then ``attach`` may be tried again."""
    global _newcomer
    _newcomer = None


def _store_at(init_method: str) -> Store:
    if not isinstance(init_method, str):
        raise TypeError(
            f"torchext.join_running_job: init_method must be a str, got {init_method!r} "
            f"({type(init_method).__name__}); a store "
            "itself goes into store="
        )
    url = urlsplit(init_method)
    if url.scheme == "file" and url.path:
        return FileStore(url.path)
    if url.scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"torchext.join_running_job: init_method 'env://' needs {' and '.join(missing)} in the environment"
            )
        host, port = os.environ["MASTER_ADDR"], _port(os.environ["MASTER_PORT"])
        if port is None:
            raise ValueError(
                "torchext.join_running_job: MASTER_PORT in the environment must be in 1..65535, got "
                f"{os.environ['MASTER_PORT']!r}"
            )
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    port = _port(url.netloc.rpartition(":")[2])
    if url.scheme != "tcp" or not url.hostname or port is None:
        raise ValueError(
            "torchext.join_running_job: init_method must be env://, tcp://host:port or file:///path, with a port in "
            "1..65535, got "
            f"{init_method!r}"
        )
    return TCPStore(url.hostname, port, is_master=False, timeout=timedelta(seconds=30))


def _port(text: str) -> int | None:
    """The port that a text names, if it does."""
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 65536 else None
