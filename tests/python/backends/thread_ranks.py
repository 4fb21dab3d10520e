"""Groups whose ranks are threads of this process: whole ones, over Gloo's sockets, of which torch does not know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchext.backends import _creator

PATIENCE = timedelta(seconds=30)


def join(
    backend: str, store: Store, rank: int, size: int, options: object | None = None, timeout: timedelta = PATIENCE
) -> Any:
    """This rank's backend of the group that `size` ranks make over the store."""
    given = dist.distributed_c10d._DistributedBackendOptions()
    given.store, given.group_rank, given.group_size = store, rank, size
    given.timeout, given.group_id, given.global_ranks_in_group = timeout, "threads", list(range(size))
    return _creator(backend)(given, options)


@dataclass
class Ended:
    """How a rank's thread ended."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0

    def said(self, kind: type[BaseException]) -> str:
        """The text of its error, which is of that kind."""
        assert type(self.error) is kind, self
        return str(self.error)


def on_ranks(ranks: int | Iterable[int], body: Callable[[int], Any], limit: float = 60.0) -> dict[int, Ended]:
    """body(rank) in a thread of each rank."""
    ended: dict[int, Ended] = {}

    def run(rank: int) -> None:
        start, mine = time.monotonic(), Ended()
        try:
            mine.value = body(rank)
        except BaseException as error:  # the test judges it
            mine.error = error
        mine.seconds = time.monotonic() - start
        ended[rank] = mine

    members = range(ranks) if isinstance(ranks, int) else list(ranks)
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in members]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"after {limit:g} s only these have ended: {ended}"
    return ended


def values(ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """What body(rank) returns; fails if one raises."""
    ended = on_ranks(ranks, body)
    for rank in range(ranks):
        if (error := ended[rank].error) is not None:
            raise AssertionError(f"rank {rank}") from error
    return [ended[rank].value for rank in range(ranks)]
