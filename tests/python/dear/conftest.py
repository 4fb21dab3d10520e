"""A group of one rank of "dear", in this process; models and bodies are those of the multi-process tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

DISTRIBUTED = Path(__file__).resolve().parents[2] / "distributed"
for folder in (DISTRIBUTED, DISTRIBUTED / "dear"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from harness import Rank  # noqa: E402
from sharded import FORMS, Pair  # noqa: E402


class Alone(Rank):
    """Rank 0 of 1; nobody starts it and nobody waits for it."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.size, self.folder = 0, 1, folder


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Rank]:
    """The only rank of a group, which a body joins by `rank.init`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes of the other tests
    try:
        yield Alone(tmp_path)
    finally:
        torch.set_num_threads(threads)
        Pair.form, Pair.dtype, Pair.fault = FORMS[0], torch.float32, None
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def joined(alone: Rank) -> Rank:
    """The only rank of the default group, a sharded one."""
    alone.init("dear")
    return alone
