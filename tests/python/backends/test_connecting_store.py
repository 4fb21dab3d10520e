"""The store in which inner groups connect: its waits end with a refusal, and run the handlers of signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from torchext import _C

LONG = timedelta(seconds=30)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "hash":
        return HashStore()
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), -1)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def later(call: Callable[[], Any]) -> None:
    threading.Timer(0.2, call).start()


def test_a_wait_ends_with_the_key(store: Store) -> None:
    connecting = _C.ConnectingStore(store)
    later(lambda: connecting.set("key", "value"))
    connecting.wait(["key"], LONG)
    assert connecting.get("key") == b"value"
    assert PrefixStore("cpu", connecting).multi_get([]) == []
    PrefixStore("cpu", connecting).set("a", "1")
    assert PrefixStore("cpu", connecting).get("a") == b"1"


CALLS: dict[str, Callable[[Store], Any]] = {
    "wait": lambda store: PrefixStore("cpu", store).wait(["key"], LONG),
    "get": lambda store: store.get("key"),
    "multi_get": lambda store: store.multi_get(["key"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wait_ends_with_a_refusal(store: Store, call: str) -> None:
    connecting = _C.ConnectingStore(store)
    later(lambda: _C.ConnectingStore(store).refuse("rank 3 has no network"))
    start = time.monotonic()
    with pytest.raises(DistStoreError, match="rank 3 has no network"):
        CALLS[call](connecting)
    assert time.monotonic() - start < 10
    connecting.refuse("rank 4 has none either")
    with pytest.raises(DistStoreError, match="rank 3 has no network"):
        connecting.wait(["key"], LONG)


def test_what_is_there_is_there_after_a_refusal(store: Store) -> None:
    connecting = _C.ConnectingStore(store)
    connecting.set("key", "value")
    connecting.refuse("rank 3 has no network")
    assert connecting.get("key") == b"value"


def test_a_wait_has_a_limit(store: Store) -> None:
    with pytest.raises(DistStoreError, match="waited 50 ms in the store for key"):
        _C.ConnectingStore(store).wait(["key"], timedelta(seconds=0.05))


def test_handlers_run_in_a_wait(store: Store) -> None:
    connecting = _C.ConnectingStore(store)
    before = signal.signal(signal.SIGUSR1, lambda *_: connecting.set("key", "value"))
    try:
        later(lambda: signal.raise_signal(signal.SIGUSR1))
        assert connecting.get("key") == b"value"

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGUSR1, stop)
        later(lambda: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(KeyboardInterrupt):
            connecting.wait(["another"], LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
