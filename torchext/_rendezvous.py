"""A store prefix that no dead attempt has used.

When torchrun restarts workers, the store survives, and with it the addresses that the dead workers wrote. A group
whose keys repeat would read them and wait for processes that are gone. So before any address is written, the ranks
agree on a token that is new: rank 0 invents it and hands it to every rank that is alive now.

A rank that waits says hello with a nonce of its own; rank 0 answers that nonce; the rank acknowledges the token, and
when all have, rank 0 says that the group is complete. What dead ranks left behind is harmless: a hello of the dead is
answered and never acknowledged, and the living one replaces it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

__all__ = ["attempt_store"]

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02
_MARGIN = timedelta(seconds=1)


def attempt_store(store: Store, rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """Returns ``store`` under a prefix that is the same on every rank and was never used before.

    Collective over the ``size`` ranks of the group.

    Args:
        store: Shared by the ranks, and perhaps by those of an earlier attempt.
        rank: This process' rank in the group.
        size: Number of ranks.
        timeout: How long to wait for the others.

    Raises:
        DistStoreError: Some ranks did not come in time; rank 0 names them.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    meeting = PrefixStore(f"torchext/attempt_{attempt}", store)
    if size == 1:
        token = uuid.uuid4().hex
    elif rank == 0:
        token = _host(meeting, size, timeout)
    else:
        token = _guest(meeting, rank, timeout)
    return PrefixStore(f"generation_{token}", meeting)


def _host(store: Store, size: int, timeout: timedelta) -> str:
    token = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    pause = _FIRST_PAUSE
    while missing:
        for rank in sorted(missing):
            if store.check([f"seen/{token}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                nonce = store.get(f"hello/{rank}")
                if answered.get(rank) != nonce:
                    store.set(f"welcome/{rank}/{nonce.decode()}", token)
                    answered[rank] = nonce
        if missing and time.monotonic() > deadline:
            raise DistStoreError(
                f"rank 0 of {size}: ranks {sorted(missing)} did not join the group within {timeout.total_seconds():g} s"
                "; check that they run and reach the same store"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    store.set(f"complete/{token}", "1")
    return token


def _guest(store: Store, rank: int, timeout: timedelta) -> str:
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", nonce)
    welcome = f"welcome/{rank}/{nonce}"
    _wait(store, welcome, timeout, f"rank {rank}: rank 0 did not join the group")
    token = store.get(welcome).decode()
    store.set(f"seen/{token}/{rank}", "1")
    # Rank 0 names those that are missing; the margin lets it speak first.
    _wait(store, f"complete/{token}", timeout + _MARGIN, f"rank {rank}: some ranks did not join the group")
    return token


def _wait(store: Store, key: str, timeout: timedelta, complaint: str) -> None:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # DistStoreError, or what a FileStore raises
        raise DistStoreError(f"{complaint} within {timeout.total_seconds():g} s ({error})") from error
