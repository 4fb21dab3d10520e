"""The averaged gradient of a parameter whose elements are spread over the ranks: each has a slice.

What works on each element by itself is done to the slice, and a norm is that of all slices. Anything else wants the
whole gradient, which is then gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunctionSubclass

from torchext.ddp.under_way import UnderWay

__all__ = ["SliceOwner", "SlicedGradient"]


class SliceOwner(Protocol):
    """Who has the slices of a model's gradients on this rank."""

    def slice_of(self, position: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of a parameter's shape, with one dimension."""

    def changed(self, position: int, zeroed: bool) -> None:
        """A slice was changed in place; ``zeroed``: to zeros."""

    def norm(self, position: int, order: float) -> torch.Tensor:
        """The norm of a whole gradient. Collective."""

    def any_rank(self, flag: torch.Tensor) -> None:
        """Replaces a flag by the largest of all ranks. Collective."""

    def whole(self, position: int) -> torch.Tensor:
        """The whole gradient, the parameter's own from now on, as those of all other parameters. Collective."""


class SlicedGradient(torch.Tensor):
    """What ``parameter.grad`` is between the backward pass and the step, in the sharded form of "dear".

    It has the parameter's shape, and no memory of its own.

    Args:
        owner: Of the slices.
        position: Of the parameter among the model's.
        part: This rank's slice.
        like: The parameter.
    """

    owner: SliceOwner
    position: int
    part: torch.Tensor
    settled: torch.Tensor | None = None  # the whole gradient, once it has been gathered
    gone = False  # it has been used in a step, cleared or replaced

    @staticmethod
    def __new__(cls, owner: SliceOwner, position: int, part: torch.Tensor, like: torch.Tensor) -> SlicedGradient:
        """As the class says."""
        self: SlicedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=part.dtype, device=part.device
        )
        self.owner, self.position, self.part = owner, position, part
        return self

    def __init__(self, owner: SliceOwner, position: int, part: torch.Tensor, like: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does it to slices where that is the same; else to whole gradients."""
        kwargs = kwargs or {}
        if function in _WITHOUT_VALUES:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function in _LIKE:
            like = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
            return function(like, *args[1:], **kwargs)
        if any(issubclass(kind, UnderWay) for kind in types):
            return NotImplemented  # those first
        if function in _NORMS:
            order = _order_of_norm(*args[1:], **kwargs)
            if order is not None:
                target = args[0]
                if isinstance(target, SlicedGradient):
                    return _norm(target, order)
                return [_norm(gradient, order) for gradient in target]
        elif function is _UNSCALE:
            return _unscale(*args)
        elif function is torch.Tensor.zero_ and args[0].gone:
            args[0].owner.changed(args[0].position, zeroed=True)
            return args[0]
        elif function in _IN_PLACE and (parts := _parts(args, kwargs)) is not None:
            return _in_place(function, args, *parts)
        return function(*_whole(args), **_whole(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What comes by another way than torch's functions has the whole gradient."""
        if function in (torch.ops.aten.detach_.default, torch.ops.aten.detach.default):
            return args[0]
        return function(*_whole(args), **_whole(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A copy of the whole gradient."""
        return _whole(self).clone()  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The whole gradient is pickled."""
        return _whole(self).__reduce_ex__(protocol)


def _each(target: Any) -> list[Any]:
    return list(target) if isinstance(target, (list, tuple)) else [target]


def _in_place(function: Any, args: tuple[Any, ...], parts: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function(*parts, **kwargs)
    for gradient in _each(args[0]):
        if isinstance(gradient, SlicedGradient):
            gradient.owner.changed(gradient.position, zeroed=function in _ZEROS)
    return args[0] if isinstance(args[0], SlicedGradient) else None


def _parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a function in slices; None: there is one of which it is not known what its slice would be."""
    changed = _each(args[0]) if args else []
    sliced = [gradient for gradient in changed if isinstance(gradient, SlicedGradient)]
    if not sliced or not all(map(_is_sliced, sliced)):  # a list has whole ones, too, of what is averaged apart
        return None

    def part(value: Any, beside: torch.Tensor) -> Any:
        if not isinstance(beside, SlicedGradient):
            return _UNKNOWN if isinstance(value, SlicedGradient) else value
        if _is_sliced(value):
            return value.part if value.shape == beside.shape else _UNKNOWN
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            value = _whole(value)
            return beside.owner.slice_of(beside.position, value) if value.shape == beside.shape else _UNKNOWN
        return value

    def parts(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            if len(value) != len(changed):
                return _UNKNOWN
            found = [part(entry, beside) for entry, beside in zip(value, changed, strict=True)]
            return _UNKNOWN if any(entry is _UNKNOWN for entry in found) else found
        return (
            part(value, changed[0])
            if len(changed) == 1 or not isinstance(value, torch.Tensor)
            else (value if value.dim() == 0 else _UNKNOWN)
        )

    given, named = tuple(parts(value) for value in args), {name: parts(value) for name, value in kwargs.items()}
    if any(value is _UNKNOWN for value in (*given, *named.values())):
        return None
    return given, named


_UNKNOWN = object()


def _whole(value: Any) -> Any:
    if isinstance(value, SlicedGradient):
        if value.gone:
            raise RuntimeError(
                "dear: in the sharded form the averaged gradient is in slices, which are gone after optimizer.step() "
                "and optimizer.zero_grad(); read it before, or take DeAROptions(form='replicated'). Where a model goes "
                "through something with its gradients (model.to(), torch.compile), call optimizer.zero_grad() first"
            )
        return value.owner.whole(value.position) if value.settled is None else value.settled
    if isinstance(value, dict):
        return {name: _whole(entry) for name, entry in value.items()}
    return type(value)(_whole(entry) for entry in value) if type(value) in (list, tuple) else value


def _order_of_norm(
    p: Any = 2.0, dim: Any = None, keepdim: bool = False, dtype: Any = None, **other: Any
) -> float | None:
    """Of the arguments behind the tensor; None: it is not the norm of all elements in their own element type."""
    p = other.pop("ord", p)
    if other or dim is not None or keepdim or dtype is not None or p is None:
        return None
    if p == "fro":
        return 2.0
    return float(p) if isinstance(p, (int, float)) and p > 0 else None


def _is_sliced(value: Any) -> bool:
    return isinstance(value, SlicedGradient) and value.settled is None and not value.gone


def _norm(gradient: Any, order: float) -> torch.Tensor:
    if _is_sliced(gradient):
        return gradient.owner.norm(gradient.position, order)  # type: ignore[no-any-return]
    gradient = _whole(gradient)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, order)
    return norm


def _unscale(gradients: Any, found: torch.Tensor, scale: torch.Tensor) -> None:
    """What a GradScaler does: every rank hears of an infinite or NaN element if one has it."""
    sliced = [gradient for gradient in gradients if _is_sliced(gradient)]
    parts = [gradient.part if _is_sliced(gradient) else _whole(gradient) for gradient in gradients]
    _UNSCALE([part for part in parts if part.numel() > 0], found, scale)
    for gradient in sliced:
        gradient.owner.changed(gradient.position, zeroed=False)
    if sliced:
        sliced[0].owner.any_rank(found)


_UNSCALE: Any = torch._amp_foreach_non_finite_check_and_unscale_

# Properties and methods for which the slice's memory does not matter.
_WITHOUT_VALUES = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "requires_grad", "_version", "grad"),
            *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "itemsize", "nbytes"),
            *("is_nested", "is_mkldnn", "is_xpu", "is_mps", "retains_grad", "output_nr"),
        )
        if hasattr(torch.Tensor, name)
    ),
    *(
        getattr(torch.Tensor, name)
        for name in (
            *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous"),
            *("get_device", "is_floating_point", "is_complex", "is_signed", "is_inference", "__len__"),
            *("requires_grad_", "detach_"),
        )
    ),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_LIKE = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}

_NORMS = {torch.linalg.vector_norm, torch.norm, torch.Tensor.norm, torch._foreach_norm}

_ONE_BY_ONE = (
    *("mul", "div", "add", "sub", "clamp", "clamp_min", "clamp_max", "clip"),
    *("nan_to_num", "neg", "sign", "zero"),
)
_ZEROS = {torch.Tensor.zero_, torch._foreach_zero_}
_IN_PLACE = {
    *(getattr(torch.Tensor, f"{name}_") for name in (*_ONE_BY_ONE, "fill", "copy", "true_divide", "addcmul", "lerp")),
    *(getattr(torch.Tensor, f"__i{name}__") for name in ("mul", "truediv", "add", "sub")),
    *(found for name in (*_ONE_BY_ONE, "copy") if (found := getattr(torch, f"_foreach_{name}_", None)) is not None),
}
