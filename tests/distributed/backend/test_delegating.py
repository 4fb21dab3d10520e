"""Every ordinary collective of a "prague" group against an independent computation, and what the name promises.

Each rank's input is a function of its rank, so every rank can compute the expected result alone. Upstream's own
all_reduce helper does not compare its result; nothing here relies on it. What needs no peer, and how ranks come to a
group: tests/python/backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, run_ranks
from rows import row_values

import torchext

pytestmark = pytest.mark.sanitize


def data(rank: int, numel: int = 7, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """What `rank` contributes: small whole numbers, exact in every dtype."""
    return ((torch.arange(numel) * 3 + rank * 5 + salt) % 11 + 1).to(dtype)


def everyone(size: int, **kwargs: Any) -> list[torch.Tensor]:
    return [data(rank, **kwargs) for rank in range(size)]


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# ---- Collectives ----


def body_all_reduce(rank: Rank) -> bool:
    rank.init()
    n = rank.size
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for numel in (0, 1, 7, 1000):
            tensor = data(rank.rank, numel, dtype)
            dist.all_reduce(tensor)
            same(tensor, torch.stack(everyone(n, numel=numel, dtype=dtype)).sum(0).to(dtype))
    reductions = {
        dist.ReduceOp.MIN: lambda all: all.amin(0),
        dist.ReduceOp.MAX: lambda all: all.amax(0),
        dist.ReduceOp.PRODUCT: lambda all: all.prod(0),
        dist.ReduceOp.SUM: lambda all: all.sum(0),
    }
    for op, expected in reductions.items():
        tensor = data(rank.rank)
        dist.all_reduce(tensor, op=op)
        same(tensor, expected(torch.stack(everyone(n))))
    for op, fold in {dist.ReduceOp.BAND: "bitwise_and", dist.ReduceOp.BOR: "bitwise_or"}.items():
        tensor = data(rank.rank, dtype=torch.int32)
        dist.all_reduce(tensor, op=op)
        expected_bits = data(0, dtype=torch.int32)
        for other in range(1, n):
            expected_bits = getattr(torch, fold)(expected_bits, data(other, dtype=torch.int32))
        same(tensor, expected_bits)
    for dtype in (torch.int32, torch.int64):  # Gloo itself refuses these
        numbers = torch.tensor([rank.rank, -rank.rank, 7 * rank.rank + 1, -5], dtype=dtype)
        work = dist.all_reduce(numbers, op=dist.ReduceOp.AVG, async_op=True)
        assert work.get_future().wait()[0].data_ptr() == numbers.data_ptr()
        total = n * (n - 1) // 2
        same(numbers, torch.tensor([total // n, -(total // n), (7 * total + n) // n, -5], dtype=dtype))
    with torch.inference_mode():
        numbers = torch.tensor([rank.rank, 7])
        dist.all_reduce(numbers, op=dist.ReduceOp.AVG)
        same(numbers, torch.tensor([n * (n - 1) // 2 // n, 7]))
    strided = data(rank.rank, 12).reshape(3, 4).t()  # without gaps: those Gloo does not see
    dist.all_reduce(strided)
    same(strided, torch.stack(everyone(n, numel=12)).sum(0).reshape(3, 4).t())
    tensors = [data(rank.rank, 5, salt=i) for i in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, torch.stack(everyone(n, numel=5, salt=i)).sum(0))
    sparse = torch.sparse_coo_tensor([[rank.rank, n]], [1.0, 2.0], (n + 1,))
    dist.all_reduce(sparse)
    same(sparse.to_dense(), torch.tensor([1.0] * n + [2.0 * n]))
    return True


def body_one_to_many(rank: Rank) -> bool:
    rank.init()
    n, me = rank.size, rank.rank
    for root in range(n):
        tensor = data(me)
        dist.broadcast(tensor, src=root)
        same(tensor, data(root))
        tensor = data(me)
        dist.reduce(tensor, dst=root)
        if me == root:
            same(tensor, torch.stack(everyone(n)).sum(0))
        outputs = [torch.zeros(7) for _ in range(n)] if me == root else None
        dist.gather(data(me), outputs, dst=root)
        if outputs is not None:
            for output, expected in zip(outputs, everyone(n), strict=True):
                same(output, expected)
        inputs = [data(root, salt=i) for i in range(n)] if me == root else None
        output = torch.zeros(7)
        dist.scatter(output, inputs, src=root)
        same(output, data(root, salt=me))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": r} for r in range(n)]
    thing = [f"from {me}"]
    dist.broadcast_object_list(thing, src=n - 1)
    assert thing == [f"from {n - 1}"]
    return True


def body_many_to_many(rank: Rank) -> bool:
    rank.init()
    n, me = rank.size, rank.rank
    outputs = [torch.zeros(7) for _ in range(n)]
    dist.all_gather(outputs, data(me))
    for output, expected in zip(outputs, everyone(n), strict=True):
        same(output, expected)
    flat = torch.zeros(7 * n)
    dist.all_gather_into_tensor(flat, data(me))
    same(flat, torch.cat(everyone(n)))

    output = torch.zeros(7)
    dist.reduce_scatter(output, [data(me, salt=part) for part in range(n)])
    same(output, torch.stack(everyone(n, salt=me)).sum(0))
    output = torch.zeros(7)
    dist.reduce_scatter_tensor(output, torch.cat([data(me, salt=part) for part in range(n)]))
    same(output, torch.stack(everyone(n, salt=me)).sum(0))

    flat = torch.zeros(2 * n)
    dist.all_to_all_single(flat, torch.cat([data(me, 2, salt=to) for to in range(n)]))
    same(flat, torch.cat([data(source, 2, salt=me) for source in range(n)]))
    # Rank r sends r + 1 elements to everyone.
    flat = torch.zeros(sum(range(1, n + 1)))
    dist.all_to_all_single(flat, torch.cat([data(me, me + 1)] * n), list(range(1, n + 1)), [me + 1] * n)
    same(flat, torch.cat([data(source, source + 1) for source in range(n)]))

    with dist.distributed_c10d._coalescing_manager():
        tensors = [data(me, 3 + i, salt=i) for i in range(4)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    for i, tensor in enumerate(tensors):
        same(tensor, torch.stack(everyone(n, numel=3 + i, salt=i)).sum(0))
    return True


def body_point_to_point(rank: Rank) -> bool:
    rank.init()
    n, me = rank.size, rank.rank
    after, before = (me + 1) % n, (me - 1) % n
    received = torch.zeros(7)
    works = [dist.irecv(received, src=before, tag=3), dist.isend(data(me), dst=after, tag=3)]
    for work in works:
        work.wait()
    same(received, data(before))
    if me == 0:
        sources = set()
        for _ in range(1, n):
            sources.add(dist.recv(received))
        assert sources == set(range(1, n))
    else:
        dist.send(data(me), dst=0)
    # Without it the next message of a fast rank could be taken for its first one, and a slow rank's be left over.
    dist.barrier()
    received.zero_()
    ops = [dist.P2POp(dist.irecv, received, before), dist.P2POp(dist.isend, data(me), after)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(received, data(before))
    dist.barrier()
    return True


def body_works(rank: Rank) -> bool:
    rank.init()
    n, me = rank.size, rank.rank
    backend = torchext.backend_of()
    number = backend._get_sequence_number_for_group()
    tensor = data(me)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    same(doubled.wait(), 2 * torch.stack(everyone(n)).sum(0))
    work.wait()
    assert work.is_completed() and work.is_success()
    same(work.get_future().value()[0], tensor)
    assert backend._get_sequence_number_for_group() == number + 1
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    work.wait(timedelta(seconds=1))
    assert backend.failure == (-1, "")
    return True


BODIES = [body_all_reduce, body_one_to_many, body_many_to_many, body_point_to_point, body_works]


def body_collective(rank: Rank, body: Callable[[Rank], bool], alone: bool) -> bool:
    if not alone:
        return body(rank)
    folder = rank.folder / f"alone{rank.rank}"
    folder.mkdir()
    return body(rank.within(folder, alone=True))


def test_collectives() -> None:
    rows = {body.__name__[5:]: (body, False) for body in BODIES}
    # Alone a rank has nobody to send to.
    rows |= {f"{body.__name__[5:]} alone": (body, True) for body in BODIES if body is not body_point_to_point}
    assert row_values(body_collective, 3, rows) == {name: [True] * 3 for name in rows}


# ---- What the name promises ----


def body_groups(rank: Rank, name: str) -> bool:
    rank.init(name)
    me = rank.rank
    assert torchext.backend_of().name() == name
    backends = {
        name: name,
        None: name,
        "gloo": "gloo",
        f"cpu:gloo,cuda:{name}": "gloo",
        f"cpu:{name},cuda:{name}": name,
    }
    for backend, own in backends.items():
        group = dist.new_group([0, 2], backend=backend)
        if me in (0, 2):
            assert group._get_backend(torch.device("cpu")).name() == own
            tensor = data(me)
            dist.all_reduce(tensor, group=group)
            same(tensor, data(0) + data(2))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    tensor = data(me)
    assert torchext.backend_of(mesh.get_group("columns")).name() == name
    dist.all_reduce(tensor, group=mesh.get_group("columns"))
    same(tensor, data(me) + data(me ^ 1))
    dist.destroy_process_group()
    return True


NAMES = {name: (name,) for name in ("prague", "hop", "torchext")}


def test_subgroups_and_meshes() -> None:
    assert row_values(body_groups, 4, NAMES) == {name: [True] * 4 for name in NAMES}


def body_split(rank: Rank, name: str) -> Any:
    rank.init(name)
    world = dist.group.WORLD
    child = world.split_group([0, 2]) if hasattr(world, "split_group") else None
    if rank.rank == 1 or child is None:
        return None
    tensor = data(rank.rank)
    child.allreduce([tensor]).wait()
    same(tensor, data(0) + data(2))
    return child._get_backend(torch.device("cpu")).name()


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="split_group of torch 2.11's own Gloo hangs at times")
def test_split() -> None:
    for name, values in row_values(body_split, 3, NAMES).items():
        assert values in ([name, None, name], [None] * 3), name


def body_ddp(rank: Rank) -> bool:
    rank.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).double()
    reference = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(data(rank.rank, dtype=torch.float64, salt=step)).sum().backward()
        wrapped(data(rank.rank, dtype=torch.float64, salt=step + 1)).sum().backward()
        optimizer.step()
        # The same by hand: the mean over the ranks of both micro-batches' gradients.
        total = [torch.zeros_like(parameter) for parameter in reference]
        for other in range(rank.size):
            for salt in (step, step + 1):
                w1, b1, w2, b2 = reference
                hidden = torch.relu(data(other, dtype=torch.float64, salt=salt) @ w1.T + b1)
                loss = (hidden @ w2.T + b2).sum()
                for sum_, gradient in zip(total, torch.autograd.grad(loss, reference), strict=True):
                    sum_ += gradient / rank.size
        with torch.no_grad():
            for parameter, gradient in zip(reference, total, strict=True):
                parameter -= 0.1 * gradient
        for actual, expected in zip(model.parameters(), reference, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    return True


def test_ddp_trains_as_computed_by_hand() -> None:
    assert run_ranks(body_ddp, 3) == [True] * 3


def body_detail(rank: Rank) -> Any:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    rank.init()
    tensor = data(rank.rank)
    dist.all_reduce(tensor)
    same(tensor, torch.stack(everyone(rank.size)).sum(0))
    with pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        dist.all_reduce(torch.ones(3 + rank.rank))
    return torchext.backend_of().name()


def test_detail_debug_mode_finds_a_mismatch() -> None:
    assert run_ranks(body_detail, 2) == ["prague"] * 2
