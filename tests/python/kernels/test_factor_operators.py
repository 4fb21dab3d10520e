"""The operators on K-FAC's factors against plain torch in float64, on every device that is there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchext.optim  # noqa: F401  (the fake kernels)

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")),
]
gram = torch.ops.torchext.packed_gram_
pack = torch.ops.torchext.pack_triangle_
unpack = torch.ops.torchext.unpack_triangle


def triangles(full: Tensor) -> Tensor:
    """[groups, d(d+1)/2], element by element."""
    dim = full.shape[1]
    return torch.stack([full[:, i, j] for i in range(dim) for j in range(i, dim)], 1)


def definition(samples: Tensor, by_dimension: bool, append_one: bool) -> Tensor:
    """Sum of x x^T in float64, sample by sample."""
    x = samples.double().cpu()
    x = x.transpose(1, 2) if by_dimension else x
    if append_one:
        x = torch.cat([x, torch.ones(*x.shape[:2], 1, dtype=torch.float64)], 2)
    return triangles(torch.einsum("gni,gnj->gij", x, x))


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-12 if found.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("append_one", [False, True])
@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("count", "inner"), [(1, 1), (7, 5), (40, 70), (0, 4)])
def test_gram(
    count: int, inner: int, groups: int, by_dimension: bool, append_one: bool, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    shape = (groups, inner, count) if by_dimension else (groups, count, inner)
    samples = torch.randn(shape, dtype=dtype).to(device)
    dim = inner + append_one
    packed = torch.full((groups, dim * (dim + 1) // 2), float("nan"), dtype=dtype, device=device)
    gram(packed, samples, by_dimension, append_one, False)
    expected = definition(samples, by_dimension, append_one)
    close(packed, expected)
    gram(packed, samples, by_dimension, append_one, True)
    close(packed, 2 * expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_dimension", [False, True])
def test_gram_of_strided_samples(by_dimension: bool, device: str) -> None:
    whole = torch.randn(2, 12, 9, dtype=torch.float64).to(device)
    for groups in (1, 2):
        for samples in (whole[:groups, ::3], whole[:groups, :, 1::2], whole[:groups].transpose(1, 2)):
            dim = samples.shape[1 if by_dimension else 2]
            packed = torch.empty(groups, dim * (dim + 1) // 2, dtype=torch.float64, device=device)
            gram(packed, samples, by_dimension, False, False)
            close(packed, definition(samples, by_dimension, False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [1, 2, 31, 32, 33, 70])
def test_pack_and_unpack(dim: int, groups: int, device: str) -> None:
    torch.manual_seed(0)
    full = torch.randn(groups, dim, dim).to(device)
    packed = torch.empty(groups, dim * (dim + 1) // 2, device=device)
    pack(packed, full)  # the lower half is not looked at
    assert torch.equal(packed.cpu(), triangles(full.cpu()))
    symmetric = full.triu() + full.triu(1).transpose(1, 2)
    assert torch.equal(unpack(packed, dim), symmetric)
    assert unpack(packed, dim).is_contiguous()
    other = torch.empty_like(packed)
    pack(other, full.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(other, packed)


def test_bad_arguments() -> None:
    packed, samples = torch.zeros(2, 6), torch.zeros(2, 4, 3)
    with pytest.raises(TypeError, match="samples is Half; supported are Float, Double"):
        gram(packed, samples.half(), False, False, False)
    with pytest.raises(TypeError, match="packed is Float, samples is Double"):
        gram(packed, samples.double(), False, False, False)
    with pytest.raises(ValueError, match="samples must be 3-D"):
        gram(packed, samples[0], False, False, False)
    with pytest.raises(ValueError, match=r"packed has shape \[2, 6\], must be \[2, 10\]"):
        gram(packed, samples, True, False, False)
    with pytest.raises(ValueError, match=r"must be \[2, 10\], the triangles of 2 matrices of 4 rows"):
        gram(packed, samples, False, True, False)
    with pytest.raises(ValueError, match="packed must be contiguous"):
        gram(torch.zeros(6, 2).T, samples, False, False, False)
    with pytest.raises(ValueError, match=r"square matrices \[groups, d, d\]"):
        pack(packed, samples)
    with pytest.raises(ValueError, match="matrices of 4 rows"):
        unpack(packed, 4)
    with pytest.raises(ValueError, match="dim = -1"):
        unpack(packed, -1)
    with pytest.raises(RuntimeError, match="samples requires grad, and this operator has no derivative"):
        gram(packed, samples.requires_grad_(), False, False, False)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    packed, samples = torch.zeros(2, 6, device=device), torch.randn(2, 5, 3).to(device)
    for arguments in ((samples, False, False, False), (samples[:, :, :2].contiguous(), False, True, True)):
        torch.library.opcheck(gram.default, (packed, *arguments))
    torch.library.opcheck(pack.default, (packed, torch.randn(2, 3, 3).to(device)))
    torch.library.opcheck(unpack.default, (packed, 3))
