"""P-Reduce: the average over the members of a call, against one computed alone in float64."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from attached import prague
from harness import Rank, run_ranks
from rows import row

import torchext

pytestmark = pytest.mark.sanitize

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Relative to the largest input: one rounding of the format for each member added, and one for the scale.
EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
DIRECT = 32_768  # float32 elements: the most that travel with their header
RING = 100_001


def data(rank: int, numel: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """What `rank` contributes: in [-1, 1], the same wherever it is computed."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return (torch.rand(numel, generator=generator) * 2 - 1).to(dtype)


def mean(members: list[int], numel: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    total = torch.zeros(numel, dtype=torch.float64)
    for member in members:
        total += data(member, numel, dtype, salt).double()
    return total / len(members)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha1(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Log:
    """Averages through one group, each checked here, and digests for the test to compare between ranks."""

    def __init__(self, rank: Rank, group: dist.ProcessGroup) -> None:
        self.me = rank.rank
        self.backend = torchext.backend_of(group)
        self.digests: dict[str, str] = {}
        self.salt = 0

    def average(self, members: list[int], numel: int, dtype: torch.dtype = torch.float32) -> None:
        self.salt += 1
        # In the middle of a larger tensor: what lies around it stays as it is.
        whole = torch.full((numel + 20,), 3.0, dtype=dtype)
        tensor = whole[10 : 10 + numel]
        tensor.copy_(data(self.me, numel, dtype, self.salt))
        if self.me in members:
            self.backend.partial_all_reduce(tensor, members).wait()
            expected = mean(members, numel, dtype, self.salt)
            tolerance = EPSILON[dtype] * (len(members) + 1)
            torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=tolerance)
            self.digests[f"{self.salt} {sorted(members)} {numel} {dtype}"] = digest(tensor)
        else:
            assert torch.equal(tensor, data(self.me, numel, dtype, self.salt))
        assert (whole[:10] == 3).all() and (whole[10 + numel :] == 3).all()


def bit_equal(logs: list[dict[str, str]], calls: int) -> None:
    seen: dict[str, set[str]] = {}
    for log in logs:
        for label, value in log.items():
            seen.setdefault(label, set()).add(value)
    assert len(seen) == calls
    for label, values in seen.items():
        assert len(values) == 1, f"members differ in {label}"


# ---- Values ----


def values(rank: Rank, shared_memory: bool) -> dict[str, str]:
    """Sockets carry between hosts what goes through shared memory on one."""
    log = Log(rank, prague(shared_memory=shared_memory))
    for members in ([0, 1], [3, 1], [2, 0, 3], [0, 1, 2, 3]):
        for dtype in FLOATS:
            for numel in (1, 7, 1000):
                log.average(members, numel, dtype)
        log.average(members, DIRECT)
        log.average(members, DIRECT + 1)
        log.average(members, RING)
        log.average(members, 1_000_003)
    for dtype in FLOATS:
        log.average([1, 2, 3], RING, dtype)
    log.average([0, 1, 2, 3], 1_000_003, torch.bfloat16)
    return log.digests


def body_values(rank: Rank) -> list[dict[str, str]]:
    rank.init()
    digests = []
    for shared_memory in (True, False):
        with row(f"shared_memory={shared_memory}"):
            digests.append(values(rank, shared_memory))
    with row("works and edges"):
        check_works(rank)
    return digests


def test_values() -> None:
    for digests in zip(*run_ranks(body_values, 4, deadline=120), strict=True):
        bit_equal(list(digests), 4 * 16 + 4 + 1)


def check_works(rank: Rank) -> None:
    backend, me = torchext.backend_of(), rank.rank
    everyone = list(range(rank.size))
    # Waited out of order, direct and ring mixed.
    sizes = [7, RING, 1, 1000, DIRECT, RING, 3]
    tensors = [data(me, numel, salt=i) for i, numel in enumerate(sizes)]
    works = [backend.partial_all_reduce(tensor, everyone) for tensor in tensors]
    for i in (6, 2, 5, 0, 1, 4, 3):
        works[i].wait()
        assert works[i].is_completed()
        expected = mean(everyone, sizes[i], torch.float32, i)
        torch.testing.assert_close(tensors[i].double(), expected, rtol=0, atol=1e-6)
    # Ordinary collectives between partial ones.
    first = backend.partial_all_reduce(data(me, RING), everyone)
    total = torch.full((3,), float(me))
    dist.all_reduce(total)
    assert total.tolist() == [6.0] * 3
    first.wait()
    future = backend.partial_all_reduce(torch.full((2,), float(me)), everyone).get_future()
    assert future.wait()[0].tolist() == [1.5, 1.5]
    # A group of one, and nothing to average.
    alone = data(me, 9)
    backend.partial_all_reduce(alone, [me]).wait()
    assert torch.equal(alone, data(me, 9))
    for members in (everyone, [me]):
        backend.partial_all_reduce(torch.empty(0), members).wait()
    # A parameter's data is what is averaged.
    parameter = torch.nn.Parameter(torch.full((2, 3), float(me)))
    backend.partial_all_reduce(parameter, everyone).wait()
    assert torch.equal(parameter.data, torch.full((2, 3), 1.5)) and parameter.requires_grad
