"""Training on with those that are left: what ``attach(..., on_peer_failure="continue")`` does when a worker dies.

Who is left. When a group fails, every process of it that lives says so in the store, from a thread of the backend: it
counts as alive whatever its training thread is doing. Once all have spoken but the one that is known to be dead, or
after :data:`GRACE` more than half, the first training thread to notice writes down who is left, and what it writes is
final (``compare_set``). A process that is not on the list, because it was stopped for longer than that, is told so and
cannot come back by itself. Where half or more are silent and might live, behind a broken link, nobody goes on.

With whom. ``dist.shrink_group`` makes a group of them, which takes the place of the old one as the model's process
group (and as the default group, if that is what it was). Nothing of the old group is used: a store that outlives the
dead is all it takes, which is torchrun's, and not that of a rank 0 which keeps it in its own process.

With what. Each has its own replica and optimizer state; what was half exchanged is given up. The survivors begin with
the exact average of their replicas.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from torchext import _C
from torchext.backends import backend_of

__all__ = ["GRACE", "Recovery"]

GRACE = 2.0  # seconds for a survivor to say that it lives; its own thread says so, within milliseconds as a rule

_SHRINK_ABORT = 1  # dist.distributed_c10d.SHRINK_ABORT, which dist does not export
_PAUSE = 0.01
_logger = logging.getLogger("torchext")


class Recovery:
    """Makes a group of the survivors, and what synchronizes a model over it.

    Args:
        ddp: The attached model.
        make_core: Makes the C++ synchronizer of a backend; collective.
    """

    def __init__(self, ddp: DistributedDataParallel, make_core: Callable[[Any], _C.AveragingSynchronizer]) -> None:
        group = ddp.process_group
        self._ddp = ddp
        self._make_core = make_core
        self.members = list(range(dist.get_world_size(group)))
        """The workers that are left, by their ranks at the time of attach."""
        self.lost: list[int] = []
        """Those that are not, in the order of their loss."""
        self.seconds = 0.0
        token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
        dist.broadcast(token, group=group, group_src=0)
        store = dist.distributed_c10d._world.pg_map[group][1]
        self._store = PrefixStore(f"torchext/survivors/{bytes(token.tolist()).hex()}", store)
        self._announce()

    def fail(self, error: BaseException) -> None:
        """Ends the model's group, if that has not failed already: a timeout, say, which the others must learn of."""
        backend = backend_of(self._ddp.process_group)
        if not backend.failure[1]:
            backend.abort_with_reason(str(error))

    def run(self, error: BaseException) -> _C.AveragingSynchronizer:
        """Shrinks the model's group to its survivors and attaches anew; collective among them.

        Raises:
            torch.distributed.DistBackendError: All live, so that ``error`` is of another kind; or the others went on
                without this process; or it may be one of a minority.
        """
        started = time.monotonic()
        while True:
            self._shrink(error)
            try:
                core = self._make_core(backend_of(self._ddp.process_group))
                break
            except dist.DistBackendError as another:
                self.fail(another)
                error = another
        self.seconds += time.monotonic() - started
        return core

    def _shrink(self, error: BaseException) -> None:
        group = self._ddp.process_group
        rank, reason = dist.get_rank(group), backend_of(group).failure[1]
        survivors = self._survivors(rank)
        lost = [position for position in range(len(self.members)) if position not in survivors]
        if not lost:
            raise error
        if rank not in survivors:
            raise dist.DistBackendError(
                f"torchext: the others train on without rank {self.members[rank]}, which did not answer for {GRACE:g} s"
                f" when the group failed ({reason}); start it anew"
            ) from error
        ranks = [dist.get_process_group_ranks(group)[position] for position in survivors]
        is_world = group is dist.group.WORLD
        shrunk = dist.shrink_group(lost, group, shrink_flags=_SHRINK_ABORT)
        if not is_world:
            # Upstream takes the excluded ranks of the group for ranks of the world here.
            dist.distributed_c10d._world.pg_group_ranks[shrunk] = {r: position for position, r in enumerate(ranks)}
        self._ddp.process_group = shrunk
        self._ddp.reducer._update_process_group(shrunk)
        self.lost += [self.members[position] for position in lost]
        self.members = [self.members[position] for position in survivors]
        self._announce()
        _logger.warning(
            "torchext: lost rank %s (%s); training goes on with %d workers, this one, rank %d, as rank %d of them",
            ", ".join(map(str, self.lost[-len(lost) :])),
            reason,
            len(survivors),
            self.members[survivors.index(rank)],
            survivors.index(rank),
        )

    def _meeting(self) -> PrefixStore:
        return PrefixStore("_".join(map(str, self.members)), self._store)

    def _announce(self) -> None:
        group = self._ddp.process_group
        backend_of(group)._announce_survival(self._meeting(), f"alive/{dist.get_rank(group)}")

    def _survivors(self, rank: int) -> list[int]:
        """Positions in ``members``, the same in every process that is told."""
        store, size = self._meeting(), len(self.members)
        backend = backend_of(self._ddp.process_group)
        suspect, reason = backend.failure
        dead = {suspect} if f"rank {suspect} died" in reason else set()
        store.set(f"alive/{rank}", "1")
        started = time.monotonic()
        # Who has not heard of the failure finds it by a timeout of its own, in a wait that may only have begun.
        patience = GRACE + 2 * backend.options._timeout.total_seconds()
        while not store.check(["decision"]):
            alive = [other for other in range(size) if store.check([f"alive/{other}"])]
            silent = set(range(size)) - set(alive)
            waited = time.monotonic() - started
            if silent <= dead or (2 * len(alive) > size and waited > GRACE):
                store.compare_set("decision", "", ",".join(map(str, alive)))
                break
            if waited > patience:
                raise dist.DistBackendError(
                    f"torchext: cannot train on with {len(alive)} of {size} workers, as it is not known that the others"
                    f" are dead: after {waited:.1f} s ranks {[self.members[other] for other in sorted(silent)]} have"
                    f" said nothing, and might go on by themselves ({reason})"
                )
            time.sleep(_PAUSE)
        store.wait(["decision"], timedelta(seconds=GRACE))
        return [int(position) for position in store.get("decision").decode().split(",")]
