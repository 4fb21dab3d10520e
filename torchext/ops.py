"""Operators over lists of tensors: gather a model into one flat buffer, scatter an average back.

Decentralized training averages a whole model at a time (Prague's P-Reduce, Luo et al., ASPLOS 2020, section 3;
DS-Sync's group averages): many tensors go into one buffer, the buffer is summed over a group, and the sum comes back
divided by the group's size. The second half is one pass over memory here: scale and scatter are fused.

Both are plain operators (``torch.ops.torchext.*``) with CPU and CUDA kernels and a fake kernel, so ``torch.compile``
keeps them in its graph and C++ threads call them through the dispatcher without the GIL. They train nothing: in grad
mode they refuse tensors that require grad, so call them on parameters under ``torch.no_grad()``.

Memory order: a tensor may be contiguous or any other dense layout (channels_last, transposed); its elements are taken
in the order in which they lie in memory, by both operators alike. A flat buffer made from channels_last tensors is
therefore to be read back into tensors of the same strides, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchext._build import load_native

load_native("_kernels")

__all__ = ["multi_tensor_average_", "multi_tensor_flatten"]


def multi_tensor_flatten(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copies ``tensors`` one after another into ``flat``.

    Args:
        tensors: any number of dense tensors of any shapes, n elements in all; empty ones are allowed.
        flat: contiguous, of shape (n,), on the same device, of the same dtype: float32, float64, float16 or bfloat16.
            Overwritten. Shares no memory with ``tensors``.

    Raises:
        TypeError: another dtype, or dtypes that differ.
        ValueError: ``flat`` is not contiguous and 1-D or its size is not n; devices differ; a tensor is not dense;
            memory is shared. Nothing has been written then.
        RuntimeError: grad mode is on and a tensor requires grad.
    """
    torch.ops.torchext.multi_tensor_flatten(list(tensors), flat)


def multi_tensor_average_(tensors: Sequence[Tensor], flat: Tensor, *, scale: float) -> None:
    """Writes ``scale * flat`` into ``tensors``, slice by slice, in one pass.

    With ``scale = 1 / g`` this turns a sum over g members into their average. float16 and bfloat16 are multiplied in
    float32 and rounded once.

    Args:
        tensors: any number of dense tensors of any shapes, n elements in all. Overwritten. No two share memory.
        flat: contiguous, of shape (n,), same device and dtype: float32, float64, float16 or bfloat16.
        scale: the factor.

    Raises:
        TypeError: another dtype, or dtypes that differ.
        ValueError: ``flat`` is not contiguous and 1-D or its size is not n; devices differ; a tensor is not dense;
            memory is shared. Nothing has been written then.
        RuntimeError: grad mode is on and a tensor requires grad.
    """
    torch.ops.torchext.multi_tensor_average_(list(tensors), flat, scale)


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _check(op: str, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """What the fake kernels check: all that the real ones do but shared memory, in their order, with their errors."""
    if flat.dim() != 1:
        raise ValueError(f"{op}: flat must be 1-D, got shape {list(flat.shape)}")
    if _has_numbers(flat) and not flat.is_contiguous():
        raise ValueError(f"{op}: flat must be contiguous, got stride {flat.stride(0)}")
    if flat.dtype not in _DTYPES:
        raise TypeError(f"{op}: flat is {flat.dtype}; supported are {', '.join(map(str, _DTYPES))}")
    for index, tensor in enumerate(tensors):
        if tensor.device != flat.device:
            raise ValueError(
                f"{op}: tensors[{index}] is on {tensor.device}, flat on {flat.device}; all must be on one device"
            )
        if tensor.dtype != flat.dtype:
            raise TypeError(f"{op}: tensors[{index}] is {tensor.dtype}, flat is {flat.dtype}; they must be the same")
        if _has_numbers(tensor) and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError(
                f"{op}: tensors[{index}] of shape {list(tensor.shape)} is not dense in memory (a slice or an expanded "
                "tensor?); pass a contiguous copy"
            )
    total = sum(tensor.numel() for tensor in tensors)
    # Not an if: sizes that depend on data are only known when the real kernel runs, and then this is asserted.
    torch._check_value(
        total == flat.numel(), lambda: f"{op}: the tensors hold {total} elements, flat holds {flat.numel()}"
    )


def _has_numbers(tensor: Tensor) -> bool:
    """Whether sizes and strides are numbers; a question about symbols would tie a compiled graph to the answer."""
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


@torch.library.register_fake("torchext::multi_tensor_flatten")  # type: ignore[untyped-decorator]
def _(tensors: Sequence[Tensor], flat: Tensor) -> None:
    _check("multi_tensor_flatten", tensors, flat)


@torch.library.register_fake("torchext::multi_tensor_average_")  # type: ignore[untyped-decorator]
def _(tensors: Sequence[Tensor], flat: Tensor, scale: float) -> None:
    _check("multi_tensor_average_", tensors, flat)
