"""Fake kernels of the operators on K-FAC's factors (kernels/factor.h); the engine calls the real ones from C++."""

from __future__ import annotations

import torch
from torch import Tensor

from torchext._build import load_native

load_native("_kernels")

__all__: list[str] = []


def _check_packed(op: str, packed: Tensor, groups: int, dim: int) -> None:
    torch._check(
        packed.dim() == 2 and packed.shape[0] == groups and packed.shape[1] == dim * (dim + 1) // 2,
        lambda: f"{op}: packed has shape {tuple(packed.shape)}, must be [{groups}, {dim * (dim + 1) // 2}]",
    )


@torch.library.register_fake("torchext::packed_gram_")  # type: ignore[untyped-decorator]
def _(packed: Tensor, samples: Tensor, by_dimension: bool, append_one: bool, add: bool) -> None:
    torch._check(samples.dim() == 3, lambda: f"packed_gram_: samples must be 3-D, got shape {tuple(samples.shape)}")
    inner = samples.shape[1 if by_dimension else 2]
    _check_packed("packed_gram_", packed, samples.shape[0], inner + int(append_one))


@torch.library.register_fake("torchext::pack_triangle_")  # type: ignore[untyped-decorator]
def _(packed: Tensor, full: Tensor) -> None:
    torch._check(full.dim() == 3, lambda: f"pack_triangle_: full must be 3-D, got shape {tuple(full.shape)}")
    _check_packed("pack_triangle_", packed, full.shape[0], full.shape[1])


@torch.library.register_fake("torchext::unpack_triangle")  # type: ignore[untyped-decorator]
def _(packed: Tensor, dim: int) -> Tensor:
    _check_packed("unpack_triangle", packed, packed.shape[0], dim)
    return packed.new_empty(packed.shape[0], dim, dim)
