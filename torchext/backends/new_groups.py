"""Process groups that take the place of others in ``torch.distributed``: a new world, a shrunk group."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Store

__all__ = ["NAMED_BY_COUNTING", "new_world", "shrunk"]

# Older torch names some groups by their ranks and how many groups there are: ranks that end one at different moments
# would give the next one different names, and groups that shrink alike one after the other would have one name.
NAMED_BY_COUNTING = "pg_names" in dist.distributed_c10d._hash_ranks_to_str.__code__.co_names
_SHRINK_ABORT = 1  # dist.distributed_c10d.SHRINK_ABORT, which dist does not export


def new_world(backend: str, store: Store, rank: int, size: int, options: Any) -> ProcessGroup:
    """A default group in the place of the one there is; collective among its members."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Torch numbers groups, and with the number they meet: one that did not come about has been counted, too.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=options._timeout,
        pg_options=options,
    )
    return dist.distributed_c10d._get_default_group()


def shrunk(group: ProcessGroup, stay: list[int]) -> ProcessGroup:
    """A group of those that stay, by their ranks in the old one; collective among them."""
    lost = [position for position in range(group.size()) if position not in stay]
    ranks = [dist.get_process_group_ranks(group)[position] for position in stay]
    with _named_after(group):
        made = dist.shrink_group(lost, group, shrink_flags=_SHRINK_ABORT)
    # Upstream takes the excluded ranks of the group for ranks of the world here.
    dist.distributed_c10d._world.pg_group_ranks[made] = {r: position for position, r in enumerate(ranks)}
    return made


@contextlib.contextmanager
def _named_after(group: ProcessGroup) -> Iterator[None]:
    """Has a group that is made of another by its ranks get a name of its own."""
    if not NAMED_BY_COUNTING:
        yield
        return
    c10d: Any = dist.distributed_c10d
    by_counting, parent = c10d._hash_ranks_to_str, group.group_name

    def by_parent(ranks: list[int]) -> str:
        return hashlib.sha1(f"{parent} {ranks}".encode(), usedforsecurity=False).hexdigest()

    c10d._hash_ranks_to_str = by_parent
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = by_counting
