"""torchext.ops against references written with torch.cat and split, per dtype, layout and size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchext import ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")),
]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "empty list": [],
    "one scalar": [()],
    "only empty tensors": [(0,), (3, 0)],
    "odd sizes": [(1,), (3, 5), (0,), (7,), (2, 3, 5), (17,), ()],
    "many small": [(n % 5 + 1,) for n in range(300)],
    "over a grain": [(1000, 401), (3,), (263, 1001)],  # several threads, pieces that cross tensors
}
Run = Callable[[Sequence[Tensor], Tensor], None]


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of their addresses, independent of the operators."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))


def make(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def flat_like(tensors: Sequence[Tensor], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.full((sum(t.numel() for t in tensors),), float("nan"), dtype=dtype, device=device)


def scaled(flat: Tensor, scale: float) -> Tensor:
    """One rounding: the product in float32 (float64 for float64), then to the dtype."""
    if flat.dtype == torch.float64:
        return flat * scale
    return (flat.float() * torch.tensor(scale, dtype=torch.float32, device=flat.device)).to(flat.dtype)


def average(tensors: Sequence[Tensor], flat: Tensor) -> None:
    ops.multi_tensor_average_(tensors, flat, scale=0.5)


both = pytest.mark.parametrize("run", [ops.multi_tensor_flatten, average], ids=["flatten", "average"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_flatten_is_cat(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> None:
    tensors = make(shapes, dtype, device)
    flat = flat_like(tensors, dtype, device)
    ops.multi_tensor_flatten(tensors, flat)
    expected = torch.cat([t.reshape(-1) for t in tensors]) if tensors else flat.new_empty(0)
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 1 / 3, -2.5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_average_is_split_and_scaled(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, scale: float, device: str
) -> None:
    tensors = make(shapes, dtype, device)
    flat = torch.randn(sum(t.numel() for t in tensors), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    before = flat.clone()
    ops.multi_tensor_average_(tensors, flat, scale=scale)
    expected = scaled(before, scale).split([t.numel() for t in tensors])
    for tensor, piece in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, piece.view(tensor.shape))
    assert torch.equal(flat, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_layouts_go_in_memory_order(dtype: torch.dtype) -> None:
    tensors = [
        torch.randn(2, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 7).to(dtype).t(),
        torch.randn(10).to(dtype)[2:9],  # dense, with an offset
        torch.randn(3, 1, 4).to(dtype)[:, 0],  # a slice of a dimension of one
    ]
    flat = flat_like(tensors, dtype)
    ops.multi_tensor_flatten(tensors, flat)
    assert torch.equal(flat, torch.cat([in_memory_order(t) for t in tensors]))
    copies = [torch.empty_like(t) for t in tensors]
    assert [c.stride() for c in copies][:2] == [t.stride() for t in tensors][:2]
    ops.multi_tensor_average_(copies, flat, scale=1.0)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)


def test_sixteen_bits_round_once_and_keep_special_values() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        flat = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        target = torch.empty(65536, dtype=dtype)
        ops.multi_tensor_average_([target], flat, scale=1 / 3)
        assert torch.equal(target.isnan(), flat.isnan())
        assert torch.equal(target.nan_to_num(0.0), scaled(flat, 1 / 3).nan_to_num(0.0))


def test_views_of_one_buffer_keep_their_neighbours() -> None:
    buffer = torch.zeros(12)
    ops.multi_tensor_average_([buffer[1:4], buffer[6:8]], torch.arange(1.0, 6.0), scale=2.0)
    assert buffer.tolist() == [0, 2, 4, 6, 0, 0, 8, 10, 0, 0, 0, 0]


def test_parameters_under_no_grad() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    parameters = list(model.parameters())
    flat = flat_like(parameters, torch.float32)
    with torch.no_grad():
        before = torch.cat([p.reshape(-1) for p in parameters]).clone()
        ops.multi_tensor_flatten(parameters, flat)
        ops.multi_tensor_average_(parameters, flat * 4, scale=0.25)
        assert torch.equal(torch.cat([p.reshape(-1) for p in parameters]), before)
    assert all(p.requires_grad and p.is_leaf for p in parameters)


@both
def test_grad_mode_refuses_what_requires_grad(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"tensors\[1\] requires grad.*torch\.no_grad"):
        run([torch.zeros(2), torch.zeros(3, requires_grad=True)], torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"flat requires grad"):
        run([torch.zeros(2)], torch.zeros(2, requires_grad=True))


def test_a_saved_tensor_that_is_overwritten_is_noticed() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        ops.multi_tensor_average_([weight], torch.zeros(3), scale=1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode() -> None:
    with torch.inference_mode():
        tensors = [torch.ones(3), torch.ones(2)]
        flat = torch.empty(5)
        ops.multi_tensor_flatten(tensors, flat)
        ops.multi_tensor_average_(tensors, flat, scale=3.0)
        assert torch.equal(tensors[0], torch.full((3,), 3.0))


wrong = pytest.mark.parametrize(
    ("tensors", "flat", "error", "message"),
    [
        ([torch.zeros(2), torch.zeros(3)], torch.zeros(4), ValueError, "the tensors hold 5 elements, flat holds 4"),
        ([], torch.zeros(4), ValueError, "the tensors hold 0 elements, flat holds 4"),
        ([torch.zeros(4)], torch.zeros(2, 2), ValueError, r"flat must be 1-D, got shape \[2, 2\]"),
        ([torch.zeros(())], torch.zeros(()), ValueError, r"flat must be 1-D, got shape \[\]"),
        ([torch.zeros(2)], torch.zeros(4)[::2], ValueError, "flat must be contiguous, got stride 2"),
        ([torch.zeros(2, dtype=torch.half)], torch.zeros(2), TypeError, r"tensors\[0\] is Half, flat is Float"),
        ([torch.zeros(2).int()], torch.zeros(2).int(), TypeError, "flat is Int; supported are Float, Double"),
        ([torch.zeros(2), torch.zeros(4, 4)[:, 1]], torch.zeros(6), ValueError, r"tensors\[1\] of shape \[4\] is not"),
        ([torch.zeros(1).expand(3)], torch.zeros(3), ValueError, r"tensors\[0\] of shape \[3\] is not dense"),
    ],
    ids=["numel", "empty list", "2-D", "0-D", "stride", "dtypes", "integers", "slice", "expanded"],
)


@both
@wrong
def test_wrong_arguments(run: Run, tensors: list[Tensor], flat: Tensor, error: type[Exception], message: str) -> None:
    before = [t.clone() for t in (*tensors, flat)]
    with pytest.raises(error, match=message):
        run(tensors, flat)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, flat), before, strict=True))


@both
@wrong
def test_fake_kernels_raise_the_same(
    run: Run, tensors: list[Tensor], flat: Tensor, error: type[Exception], message: str
) -> None:
    for torchs, ours in (("Half", "torch.float16"), ("Float", "torch.float32"), ("Int", "torch.int32")):
        message = message.replace(f"is {torchs}", f"is {ours}")
    message = message.replace("Float, Double", "torch.float32, torch.float64")
    with FakeTensorMode() as mode, pytest.raises(error, match=message):
        run([mode.from_tensor(tensor) for tensor in tensors], mode.from_tensor(flat))


@both
def test_shared_memory_with_flat(run: Run) -> None:
    flat = torch.zeros(6)
    with pytest.raises(ValueError, match=r"tensors\[1\] shares memory with flat"):
        run([torch.zeros(4), flat[4:]], flat)


def test_tensors_that_share_memory() -> None:
    weight = torch.ones(2)
    flat = torch.zeros(4)
    ops.multi_tensor_flatten([weight, weight], flat)  # reading one twice is fine
    assert torch.equal(flat, torch.ones(4))
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] share memory.*pass each tensor once"):
        ops.multi_tensor_average_([weight, weight], flat, scale=1.0)


@both
def test_devices_that_differ(run: Run) -> None:
    with pytest.raises(ValueError, match="is on"):
        run([torch.zeros(2, device="meta")], torch.zeros(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_cuda_key_holds_a_kernel_that_checks_or_explains() -> None:
    # Without a GPU there are no CUDA tensors; the CUDA kernel can still be called with CPU ones and must refuse them.
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises((ValueError, NotImplementedError), match=r"all must be on one device|without CUDA kernels"):
        torch.ops.torchext.multi_tensor_flatten.default.redispatch(key, [torch.zeros(2)], torch.zeros(2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["odd sizes", "empty list"])
def test_opcheck(name: str, dtype: torch.dtype, device: str) -> None:
    tensors = make(SHAPES[name], dtype, device)
    flat = torch.zeros(sum(t.numel() for t in tensors), dtype=dtype, device=device)
    torch.library.opcheck(torch.ops.torchext.multi_tensor_flatten.default, (tensors, flat))
    torch.library.opcheck(torch.ops.torchext.multi_tensor_average_.default, (tensors, flat, 0.25))


def test_compile_keeps_one_graph() -> None:
    def step(tensors: list[Tensor], flat: Tensor) -> Tensor:
        ops.multi_tensor_flatten(tensors, flat)
        ops.multi_tensor_average_(tensors, flat + 1.0, scale=0.5)
        return tensors[0] * 2.0

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for size in (3, 5, 8):  # sizes become symbols from the second one on
        eager, graph = [torch.ones(2, size), torch.ones(4)], [torch.ones(2, size), torch.ones(4)]
        flats = [torch.zeros(2 * size + 4) for _ in range(2)]
        assert torch.equal(step(eager, flats[0]), compiled(graph, flats[1]))
        assert all(torch.equal(a, b) for a, b in zip((*eager, flats[0]), (*graph, flats[1]), strict=True))


def test_from_many_threads_at_once() -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for size in (3, 1000, 600_000):
                tensors = [torch.full((size,), float(seed)), torch.full((7,), float(seed))]
                flat = torch.empty(size + 7)
                ops.multi_tensor_flatten(tensors, flat)
                ops.multi_tensor_average_(tensors, flat, scale=0.5)
                assert torch.equal(torch.cat(tensors), torch.full((size + 7,), seed * 0.5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
