"""Every ordinary collective of a "prague" group against an independent computation, and what the name promises.

Each rank's input is a function of its rank, so every rank can compute the expected result alone. Upstream's own
all_reduce helper does not compare its result; nothing here relies on it.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Rank, launch, run_ranks

import torchext
from torchext.errors import BackendOptionsError, UnsupportedBackendError

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
    strided = torch.zeros(4, 6)[:, ::2]
    dist.all_reduce(strided.copy_(torch.full((4, 3), float(rank.rank))))
    works = []
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
# Alone a rank has nobody to send to.
CASES = [(body, size) for body in BODIES for size in (1, 3) if size > 1 or body is not body_point_to_point]


@pytest.mark.parametrize(("body", "size"), CASES, ids=[f"{body.__name__[5:]}-{size}" for body, size in CASES])
def test_collective(body: Any, size: int) -> None:
    assert run_ranks(body, size) == [True] * size


# ---- What the name promises ----


def body_groups(rank: Rank, name: str) -> bool:
    rank.init(name)
    me = rank.rank
    assert dist.get_backend() == name
    for backend in (name, None, "gloo", f"cpu:gloo,cuda:{name}", f"cpu:{name},cuda:{name}"):
        group = dist.new_group([0, 2], backend=backend)
        if me in (0, 2):
            tensor = data(me)
            dist.all_reduce(tensor, group=group)
            same(tensor, data(0) + data(2))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    tensor = data(me)
    dist.all_reduce(tensor, group=mesh.get_group("columns"))
    same(tensor, data(me) + data(me ^ 1))
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("name", ["prague", "hop", "torchext"])
def test_subgroups_and_meshes(name: str) -> None:
    assert run_ranks(body_groups, 4, name) == [True] * 4


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
@pytest.mark.parametrize("name", ["prague", "hop", "torchext"])
def test_split(name: str) -> None:
    names = run_ranks(body_split, 3, name)
    assert names in ([name, None, name], [None] * 3)


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


def body_errors(rank: Rank) -> bool:
    with pytest.raises(BackendOptionsError, match=r"pg_options for backend 'prague' is builtins\.dict"):
        rank.init(pg_options={"timeout": 3}, store="other")
    rank.init(timeout=17)
    backend = torchext.backend_of()
    assert backend.name() == "prague" and backend.rank() == rank.rank and backend.size() == rank.size
    with pytest.raises(UnsupportedBackendError, match="'gloo'"):
        torchext.backend_of(dist.new_group(backend="gloo"))
    torchext.register()
    torchext.register()
    # Options are the user's: one object may serve several groups, and keeps what it was given.
    options = torchext.PragueOptions(timeout=timedelta(seconds=23))
    for _ in range(2):
        dist.new_group([0], backend="prague", timeout=timedelta(seconds=29), pg_options=options)
        assert options._timeout == timedelta(seconds=23) and not options.global_ranks_in_group
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=23), dist.group.WORLD)
    tensor = data(rank.rank)
    dist.all_reduce(tensor)
    return True


def test_typed_errors_and_registration() -> None:
    assert run_ranks(body_errors, 2) == [True] * 2


def body_device(rank: Rank) -> tuple[str, str]:
    rank.init()
    backend = torchext.backend_of()
    try:
        backend.allreduce([torch.ones(2, device="meta")])
    except NotImplementedError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_device_that_is_not_carried() -> None:
    for kind, text in run_ranks(body_device, 1):
        assert kind == "NotImplementedError"
        assert "meta" in text and "cpu and cuda" in text


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


def body_dead_attempt(rank: Rank, port: int) -> bool:
    """A store that holds what a dead attempt left: greetings and addresses."""
    store = dist.TCPStore("127.0.0.1", port, rank.size, rank.rank == 0, timedelta(seconds=20))
    if rank.rank == 0:
        for other in range(1, rank.size):
            for prefix in ("default_pg/", ""):
                store.set(f"{prefix}cpu//torchext/attempt_0/hello/{other}", "nonce of the dead")
    store.set(f"up{rank.rank}", "1")
    store.wait([f"up{other}" for other in range(rank.size)])
    dist.init_process_group("prague", store=store, rank=rank.rank, world_size=rank.size)
    tensor = data(rank.rank)
    dist.all_reduce(tensor)
    same(tensor, torch.stack(everyone(rank.size)).sum(0))
    return True


def test_what_a_dead_attempt_left_is_not_read() -> None:
    from harness import free_port

    assert run_ranks(body_dead_attempt, 3, free_port()) == [True] * 3


@pytest.mark.parametrize("backend", ["prague", "hop", "dssync", "dear"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_that_never_joins_is_named(backend: str, size: int) -> None:
    absent = size - 1
    with launch(body_absent, size, backend, absent) as ranks:
        ranks.expect("ready")
        ranks.proceed(list(range(absent)))
        for outcome in ranks.outcomes(list(range(absent)), deadline=30):
            assert outcome.value.startswith(f"rank {outcome.rank}"), outcome
            assert f": ranks [{absent}] did not join the group within 2 s" in outcome.value, outcome


def body_absent(rank: Rank, backend: str, absent: int) -> str:
    rank.report("ready")  # so that none of the others comes late
    rank.pause()
    if rank.rank == absent:
        return ""
    try:
        rank.init(backend, timeout=2)
    except dist.DistStoreError as error:
        return str(error)
    return "joined without the last"
