"""How ranks meet in a store that an earlier group of theirs has used; a thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from torchext.backends.store_prefix import attempt_store, decline

PATIENCE = timedelta(seconds=3)
LATE = 0.3  # seconds


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Gives a rank its own line to the store that all of a test share."""
    if request.param == "hash":
        shared = HashStore()
        return lambda: shared
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"), -1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


class Ranks:
    """Threads that act as the ranks of groups, one group after the other."""

    def __init__(self, connect: Callable[[], Store], size: int) -> None:
        self.stores = [connect() for _ in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def join(self, rank: int, timeout: timedelta = PATIENCE) -> Future[PrefixStore]:
        return self.pool.submit(attempt_store, self.stores[rank], rank, len(self.stores), timeout)

    def decline(self, rank: int) -> Future[None]:
        return self.pool.submit(decline, self.stores[rank], rank, len(self.stores), ValueError("bad"))

    def form_group(self) -> None:
        for joined in [self.join(rank) for rank in range(len(self.stores))]:
            joined.result(timeout=10)


def test_what_a_dead_attempt_left_is_not_read(connect: Callable[[], Store]) -> None:
    ranks = Ranks(connect, 3)
    hellos = [f"torchext/attempt_0/hello/{rank}" for rank in (1, 2)]
    for hello in hellos:
        ranks.stores[0].set(hello, "nonce of the dead")
    joined = [each.result(timeout=10) for each in [ranks.join(rank) for rank in range(3)]]
    joined[0].set("key", "value")
    assert [store.get("key") for store in joined] == [b"value"] * 3  # one prefix
    assert [ranks.stores[0].get(hello) for hello in hellos] == [b"", b""]  # those keys it is, and nobody waits


def assert_told(late: Future[PrefixStore], decliner: int) -> None:
    start = time.monotonic()
    with pytest.raises(DistStoreError, match=rf": rank {decliner} cannot join the group: ValueError: bad"):
        late.result(timeout=10)
    assert time.monotonic() - start < 2


def test_who_comes_late_to_a_second_group_that_rank_0_has_declined(connect: Callable[[], Store]) -> None:
    ranks = Ranks(connect, 2)
    ranks.form_group()
    declined = ranks.decline(0)
    time.sleep(LATE)
    assert_told(ranks.join(1), decliner=0)
    declined.result(timeout=10)


def test_who_comes_late_to_a_second_group_that_another_guest_has_declined(connect: Callable[[], Store]) -> None:
    ranks = Ranks(connect, 3)
    ranks.form_group()
    host, declined = ranks.join(0), ranks.decline(1)
    time.sleep(LATE)
    assert_told(ranks.join(2), decliner=1)
    assert_told(host, decliner=1)
    declined.result(timeout=10)


def test_who_comes_again_after_a_timeout_to_a_group_that_is_declined(connect: Callable[[], Store]) -> None:
    ranks = Ranks(connect, 2)
    with pytest.raises(DistStoreError, match=r"rank 1: rank 0 did not join the group within 0\.2 s"):
        ranks.join(1, timedelta(seconds=0.2)).result(timeout=10)
    declined = ranks.decline(0)
    time.sleep(LATE)
    assert_told(ranks.join(1), decliner=0)
    declined.result(timeout=10)


@pytest.mark.parametrize("waiting", [[1], [0], [0, 1]], ids=["for rank 0", "for a guest", "for the last guest"])
def test_a_group_that_is_called_off_is_not_waited_for(connect: Callable[[], Store], waiting: list[int]) -> None:
    stores = [connect() for _ in range(3)]
    called_off = threading.Event()
    pool = ThreadPoolExecutor(2)
    joining = [
        pool.submit(attempt_store, stores[rank], rank, 3, timedelta(seconds=30), called_off.is_set) for rank in waiting
    ]
    time.sleep(LATE)
    called_off.set()
    start = time.monotonic()
    for joined in joining:
        with pytest.raises(DistStoreError, match="another rank cannot come to it"):
            joined.result(timeout=10)
    assert time.monotonic() - start < 2
