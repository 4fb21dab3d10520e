"""A store prefix that no dead attempt has used.

When torchrun restarts workers, the store survives, and with it the addresses that the dead workers wrote. A group
whose keys repeat would read them and wait for processes that are gone. So before any address is written, the ranks
agree on a token that is new: rank 0 invents it and hands it to every rank that is alive now.

A rank that waits says hello with a nonce of its own; rank 0 answers that nonce; the rank acknowledges the token, and
when all have, rank 0 says that the group is complete. A hello stands only while its rank waits for the answer: of an
earlier group on the same store there is none that rank 0 could take for one of now. What dead ranks left behind is
harmless: a hello of the dead is answered and never acknowledged, and the living one replaces it.

Where somebody is missing at the timeout, rank 0 says that instead, and every rank raises it. A rank that cannot join
(``decline``) answers with its reason in the same places: rank 0 instead of the token, others instead of "1". Rank 0
stays for some seconds then, to tell it to those who come late.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

__all__ = ["attempt_store", "decline"]

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02
_MARGIN = timedelta(seconds=1)
_CALLED_OFF = "there will be no group, as another rank cannot come to it"
_JOINED = "1"
_REFUSAL = "!"  # before a reason, in place of a token
_DECLINE_PATIENCE = timedelta(seconds=5)
_LONGEST_REASON = 300

CalledOff = Callable[[], bool]


def attempt_store(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    called_off: CalledOff | None = None,
    *,
    is_fresh: bool = False,
) -> PrefixStore:
    """Returns ``store`` under a prefix that is the same on every rank and was never used before.

    Collective over the ``size`` ranks of the group.

    Args:
        store: Shared by the ranks, and perhaps by those of an earlier attempt.
        rank: This process' rank in the group.
        size: Number of ranks.
        timeout: How long to wait for the others.
        called_off: Looked at while waiting: whether there will be no group.
        is_fresh: No earlier attempt has used ``store``. Ranks that torchrun has not started equally often, as where one
            joins, meet there all the same.

    Raises:
        DistStoreError: Some ranks did not come in time, or one has declined; named on every rank that waits. Or it was
            called off.
    """
    prefix = PrefixStore("torchext", store) if is_fresh else _prefix_of_attempt(store)
    if size == 1:
        token = uuid.uuid4().hex
    elif rank == 0:
        token = _host(prefix, size, timeout, called_off)
    else:
        token = _guest(prefix, rank, timeout, called_off)
    return PrefixStore(f"generation_{token}", prefix)


def decline(store: Store, rank: int, size: int, error: Exception) -> None:
    """Tells the ranks that are in ``attempt_store``, or come within seconds, that this one does not join, and why."""
    text = "".join(c if c.isprintable() else " " for c in str(error))[:_LONGEST_REASON]
    reason = f"rank {rank} cannot join the group: {type(error).__name__}: {text}"
    prefix = _prefix_of_attempt(store)
    with contextlib.suppress(RuntimeError):  # nobody waits here yet, or the store is gone
        if rank == 0:
            _Host(prefix, size, "").refuse(reason)
        else:
            token = _hello(prefix, rank, _DECLINE_PATIENCE, None)
            if not token.startswith(_REFUSAL):
                prefix.set(f"seen/{token}/{rank}", reason)
                # Not to come back, if the caller tries again, before rank 0 has read it.
                prefix.wait([f"complete/{token}"], _DECLINE_PATIENCE)


def _prefix_of_attempt(store: Store) -> PrefixStore:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"torchext/attempt_{attempt}", store)


def _deadline(timeout: timedelta) -> float:
    return time.monotonic() + timeout.total_seconds()


class _Host:
    """Rank 0's answers to those who say hello."""

    def __init__(self, store: Store, size: int, answer: str) -> None:
        self.store, self.size, self.text = store, size, answer
        self.answered: dict[int, bytes] = {}
        self.pause = _FIRST_PAUSE

    def answer(self, ranks: Iterable[int]) -> None:
        """Answers those of ``ranks`` that have said hello, and pauses."""
        for rank in ranks:
            if self.store.check([f"hello/{rank}"]):
                nonce = self.store.get(f"hello/{rank}")
                if nonce and self.answered.get(rank) != nonce:
                    self.store.set(f"welcome/{rank}/{nonce.decode()}", self.text)
                    self.answered[rank] = nonce
        time.sleep(self.pause)
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)

    def refuse(self, reason: str) -> None:
        """Tells those who have no answer yet why there will be no group, for as long as patience lasts.

        Not those who have one: they know, and a hello anew is for the caller's next try.
        """
        self.text = _REFUSAL + reason
        deadline = _deadline(_DECLINE_PATIENCE)
        while (late := set(range(1, self.size)) - self.answered.keys()) and time.monotonic() < deadline:
            self.answer(sorted(late))


def _host(store: Store, size: int, timeout: timedelta, called_off: CalledOff | None) -> str:
    token = uuid.uuid4().hex
    host, deadline = _Host(store, size, token), _deadline(timeout)
    missing = set(range(1, size))
    reason = ""
    declined = False
    while missing and not reason:
        for rank in sorted(missing):
            if store.check([f"seen/{token}/{rank}"]):
                said = store.get(f"seen/{token}/{rank}").decode()
                missing.discard(rank)
                if said != _JOINED and not declined:
                    reason, declined = said, True
        if missing and not reason and time.monotonic() > deadline:
            reason = (
                f"ranks {sorted(missing)} did not join the group within {timeout.total_seconds():g} s; check that they"
                " run and reach the same store"
            )
        if missing and not reason and called_off and called_off():
            reason = _CALLED_OFF
        if missing and not reason:
            host.answer(sorted(missing))
    store.set(f"complete/{token}", reason or _JOINED)
    if declined:
        with contextlib.suppress(RuntimeError):  # the store is gone: with those it could have told
            host.refuse(reason)
    if reason:
        raise DistStoreError(f"rank 0 of {size}: {reason}")
    return token


def _guest(store: Store, rank: int, timeout: timedelta, called_off: CalledOff | None) -> str:
    token = _hello(store, rank, timeout, called_off)
    if token.startswith(_REFUSAL):
        raise DistStoreError(f"rank {rank}: {token.removeprefix(_REFUSAL)}")
    store.set(f"seen/{token}/{rank}", _JOINED)
    # Rank 0 names those that are missing; the margin lets it speak first.
    complaint = f"rank {rank}: rank 0 has gone, or some ranks did not come,"
    _wait(store, f"complete/{token}", timeout + _MARGIN, complaint, called_off)
    said = store.get(f"complete/{token}").decode()
    if said != _JOINED:
        raise DistStoreError(f"rank {rank}: {said}")
    return token


def _hello(store: Store, rank: int, timeout: timedelta, called_off: CalledOff | None) -> str:
    """What rank 0 answers."""
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", nonce)
    welcome = f"welcome/{rank}/{nonce}"
    try:
        _wait(store, welcome, timeout, f"rank {rank}: rank 0 did not join the group", called_off)
        return store.get(welcome).decode()
    finally:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the hello
            store.set(f"hello/{rank}", "")  # not deleted: rank 0 gets what it has found


def _wait(store: Store, key: str, timeout: timedelta, complaint: str, called_off: CalledOff | None) -> None:
    try:
        _look(store, key, timeout, called_off)
    except RuntimeError as error:  # DistStoreError, or what a FileStore raises
        raise DistStoreError(f"{complaint} within {timeout.total_seconds():g} s ({error})") from error


def _look(store: Store, key: str, timeout: timedelta, called_off: CalledOff | None) -> None:
    """Looks again and again: in a wait inside the store, Python would not run the handlers of signals."""
    deadline, pause = _deadline(timeout), _FIRST_PAUSE
    while not store.check([key]):
        if called_off and called_off():
            raise DistStoreError(_CALLED_OFF)
        if time.monotonic() > deadline:
            raise DistStoreError("timed out")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
